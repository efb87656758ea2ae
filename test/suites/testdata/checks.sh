# Runs the checks of an engine in a root that has it. They are functions of the engine's script, /srv/engine.sh; one that
# the engine has not is left out. Without GPUs "none" must work, or else the engine does not run on this machine. Each
# check is a shell of its own, which begins here too, and its output and status are files in /media.
. /srv/row # runtime, and uuid: that of the last GPU
export GPU_CDI_ROOT=/sim

# configure has hook install or uninstall change the engine's files, which are those of the root.
configure() { GPU_CDI_ROOT=/ gpu-cdi-plugin hook "$@" >&2; }
# doctor has the doctor try an engine. The nodes can be opened, with numbers that are not known to be wrong.
doctor() {
	rm /sim/proc/devices
	for node in /sim/dev/nvidia[0-9]* /sim/dev/nvidiactl /sim/dev/nvidia-[um]*; do
		rm "$node"
		mknod -m 666 "$node" c 1 3
	done
	# Engines that run on keep the numbers of nodes until a spec is written.
	cp /run/cdi/nvidia.com-gpu.json /run/cdi/spec && mv /run/cdi/spec /run/cdi/nvidia.com-gpu.json
	status=0
	gpu-cdi-plugin doctor --try "$1" --device nvidia.com/gpu=all -o json || status=$?
	[ $status -eq 4 ] || return $status # it has findings about this machine
}
# containers_conf configures podman and buildah.
containers_conf() {
	mkdir -p /etc/containers
	cat >/etc/containers/containers.conf <<-END
		[containers]
		netns = "none"
		# The settings of the kernel are read-only here, limits cannot be raised, and cgroup v2 may have no controllers.
		default_sysctls = []
		default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
		pids_limit = 0
		[engine]
		runtime = "$runtime"
		cgroup_manager = "cgroupfs"
		events_logger = "none"
	END
}
# await waits until a command succeeds, while a process runs that logs to /media/daemon.log.
await() {
	process=$1
	shift
	until "$@" >/dev/null 2>&1; do
		kill -0 "$process" 2>/dev/null || {
			tail -n 1 /media/daemon.log >&2
			return 1
		}
		sleep 0.1
	done
}
# leased runs a command that leases a GPU. The others are held; their UUIDs are the first line.
leased() {
	device-manager serve --plugin 'gpu-cdi-plugin serve' >/media/daemon.log 2>&1 &
	await $! sh -c 'device-manager node --devices | grep Healthy'
	mkfifo /run/holds
	gpu-run 3 -- sh -c 'echo $CUDA_VISIBLE_DEVICES; echo >/run/holds; exec sleep 1000' &
	read -r _ </run/holds
	gpu-run --wait 0 1 -- "$@"
	kill $!
}

# cannot has the check say "no" if the engine has failed with that message, for a reason of its own.
cannot() { grep -qF "$1" /media/$check.log && echo "no: $1" >/media/$check.cell; }

. /srv/engine.sh
if [ $# -gt 0 ]; then
	check=$1
	set -e
	"$1"
	exit
fi
set +e
check() {
	timeout 120 sh -e /srv/script "$1" >/media/$1 2>/media/$1.log </dev/null
	status=$?
	echo $status >/media/$1.status
	return $status
}
# Engines keep containers in file systems of their own: the root is an overlay, over which they make none.
for name in containers docker containerd; do
	mkdir -p /var/lib/$name
	mount -t tmpfs tmpfs /var/lib/$name
done
mkdir -p /var/tmp /etc/cdi
gpu-cdi-plugin cdi generate --write >&2 || exit
if ! start >/media/none.log 2>&1; then
	echo 1 >/media/none.status
	exit 0
fi
check none || exit 0
for name in devices hook live try lease; do
	if command -v $name | grep -qx $name; then check $name; fi # a function
done
exit 0
