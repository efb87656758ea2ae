# docker as docs/docker.md has it for versions before 28.2, without networks.
start() {
	mkdir -p /etc/docker
	echo '{"features": {"cdi": true}}' >/etc/docker/daemon.json
	dockerd --bridge none --iptables=false --ip6tables=false --userland-proxy=false \
		--exec-opt native.cgroupdriver=cgroupfs >/media/daemon.log 2>&1 &
	await $! docker version && docker load --quiet --input /srv/ubuntu.tar
}
none() { docker run --rm ubuntu sh -c 'echo started'; }
devices() {
	for name in 0 $uuid all; do docker run --rm --device nvidia.com/gpu=$name ubuntu nvidia-smi -L; done
}
hook() {
	configure install docker
	kill -HUP "$(cat /run/docker.pid)"
	await $$ sh -c 'docker info | grep gpu-cdi'
	docker run --rm --runtime gpu-cdi --annotation cdi.k8s.io/a=nvidia.com/gpu=0 ubuntu nvidia-smi -L
	configure uninstall
}
try() { doctor docker; }
lease() { leased docker run --rm ubuntu nvidia-smi -L; }
