# podman with one runtime. Containers have no network, which the root has not either.
start() {
	containers_conf
	podman load --quiet --input /srv/ubuntu.tar
}
none() { podman run --rm ubuntu sh -c 'echo started'; }
devices() {
	for name in 0 $uuid all; do podman run --rm --device nvidia.com/gpu=$name ubuntu nvidia-smi -L; done
}
hook() { annotated podman; }
live() { annotated live; }
annotated() {
	configure install $1
	podman run --rm --annotation cdi.k8s.io/a=nvidia.com/gpu=0 ubuntu nvidia-smi -L
	configure uninstall
}
try() { doctor podman; }
lease() { leased podman run --rm ubuntu nvidia-smi -L; }
