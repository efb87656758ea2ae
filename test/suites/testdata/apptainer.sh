# Apptainer finds the driver on the host itself (--nv), so the simulated one is installed there. It gives containers all
# GPUs and names those of the lease: only these are kept of what nvidia-smi lists.
start() {
	cp -a /sim/dev/nvidia* /dev/
	cp -a /sim/usr/lib/x86_64-linux-gnu/. /usr/lib/x86_64-linux-gnu/
	cp -a /sim/usr/bin/. /usr/bin/
	ldconfig
	mkdir /srv/rootfs
	tar -xOf /srv/ubuntu.tar layer.tar | tar -x -C /srv/rootfs
}
none() { apptainer exec --userns /srv/rootfs sh -c 'echo started'; }
lease() {
	# An image that Apptainer has built sets this path itself.
	leased apptainer exec --userns /srv/rootfs sh -c 'echo $CUDA_VISIBLE_DEVICES; LD_LIBRARY_PATH=/.singularity.d/libs nvidia-smi -L' >/run/leased
	sed -n 1p /run/leased
	grep "^GPU .*$(sed -n 2p /run/leased)" /run/leased | sed 's/^GPU [0-9]*/GPU 0/'
}
