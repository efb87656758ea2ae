# buildah runs a command in a container that it builds.
start() {
	containers_conf
	mkdir /srv/rootfs
	tar -xOf /srv/ubuntu.tar layer.tar | tar -x -C /srv/rootfs
	buildah from --name built scratch
	buildah add built /srv/rootfs /
	buildah config --env PATH=/usr/sbin:/usr/bin built
}
none() { buildah run --network none built sh -c 'echo started'; }
devices() {
	for name in 0 $uuid all; do
		buildah run --network none --device nvidia.com/gpu=$name built nvidia-smi -L && continue
		# The specs are in /run/cdi, where 1.39 does not look. 1.43 loses the permissions that a spec has for a node.
		cannot 'unresolvable CDI devices' || cannot 'device access at 8 field cannot be empty' ||
			cannot 'write to `devices.allow`: Invalid argument'
		return
	done
}
