# Makes a throw-away root over another one, and runs a script in it: with systemd as process 1, in namespaces of its own
# without systemd, or in a chroot. Runs in a mount namespace of its own. All that is written lands in DIR/scratch/upper.
# usage: boot.sh LOWER DIR chroot|namespaces|controllers|systemd CGROUP SCRIPT...
#   CGROUP exists in all trees of cgroups, which begin there for what runs in the root. DIR has the directories root and scratch, files, which is copied into the root, and out, which is /media there. With
#   several scripts, for each a boot: /run, /tmp and /dev are new, and the boot ID is another.
set -eu
lower=$1 dir=$2 mode=$3 cgroup=$4
shift 4
for tree in /sys/fs/cgroup /sys/fs/cgroup/*; do
	if [ -e "$tree$cgroup"/cpuset.effective_cpus ]; then # v1 lets no process in before
		for name in cpuset.cpus cpuset.mems; do cat "$tree"/$name >"$tree$cgroup"/$name; done
	fi
	[ ! -e "$tree$cgroup" ] || echo $$ >"$tree$cgroup"/cgroup.procs
done
mount --make-rprivate /
mount -t tmpfs tmpfs "$dir"/scratch
mkdir "$dir"/scratch/upper "$dir"/scratch/work
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$dir/scratch/upper,workdir=$dir/scratch/work" "$dir"/root
root=$dir/root
mkdir -p "$root"/run "$root"/media "$root"/old "$root"/var/lib/man-db
for path in etc/gpu-cdi-plugin var/lib/gpu-cdi-plugin etc/device-manager var/lib/device-manager var/lib/kubelet; do
	rm -rf "${root:?}/$path"
done
# Manual pages are not indexed: that takes half a minute.
mount -t tmpfs tmpfs "$root"/var/lib/man-db

# fresh makes what a boot makes anew.
fresh() {
	for name in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$name"; done
	for name in null zero full random urandom tty fuse; do
		[ ! -e /dev/$name ] || { : >"$root/dev/$name" && mount --bind /dev/$name "$root/dev/$name"; }
	done
	mkdir "$root"/dev/pts "$root"/dev/shm
	ln -s /proc/self/fd "$root"/dev/fd
	cp "$1" "$root"/tmp/script
	cat /proc/sys/kernel/random/uuid >"$root"/run/boot_id
}
mount -t sysfs -o ro sysfs "$root"/sys
mount --bind "$dir"/out "$root"/media
cp -a "$dir"/files/. "$root"/

if [ $mode = chroot ]; then
	fresh "$1"
	mount -t proc proc "$root"/proc
	exec chroot "$root" /bin/sh /tmp/script
fi

if [ $mode = systemd ]; then
	# systemd starts what the script needs, then the script, and ends.
	units=$root/etc/systemd/system
	mkdir -p "$units"
	cat >"$units"/test.service <<-'END'
		[Unit]
		Requires=basic.target
		After=basic.target
		[Service]
		Type=oneshot
		StandardOutput=append:/media/log
		StandardError=append:/media/log
		ExecStart=/bin/sh /srv/script
		ExecStopPost=/bin/systemctl --no-block --force poweroff
	END
	printf '[Unit]\nRequires=test.service\n' >"$units"/test.target
	ln -sf test.target "$units"/default.target
fi
for script; do
	fresh "$script"
	cp "$script" "$root"/srv/script
	unshare --mount --pid --uts --ipc --net --cgroup --fork --kill-child /bin/sh -eu -c '
		mount -t proc proc "$1"/proc
		mount --bind "$1"/proc/sys/net "$1"/proc/sys/net # those of the network namespace
		mount --bind "$1"/run/boot_id "$1"/proc/sys/kernel/random/boot_id
		mount --rbind "$1"/proc/sys "$1"/proc/sys
		mount -o remount,bind,ro "$1"/proc/sys # the settings of the kernel are those of this machine
		if [ $2 = controllers ] && [ ! -e /sys/fs/cgroup/cgroup.procs ]; then
			mount -t tmpfs tmpfs "$1"/sys/fs/cgroup
			while IFS=: read -r _ controllers _; do
				[ "$controllers" ] || continue
				mkdir "$1/sys/fs/cgroup/${controllers#name=}"
				mount -t cgroup -o "$controllers" cgroup "$1/sys/fs/cgroup/${controllers#name=}"
			done </proc/self/cgroup
		else
			mount -t cgroup2 cgroup2 "$1"/sys/fs/cgroup
		fi
		cd "$1"
		pivot_root . old
		umount -l /old
		if [ $2 = systemd ]; then
			exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /sbin/init --log-target=null \
				--show-status=no
		fi
		# With controllers, a cgroup of v2 has either processes or children that use them.
		if mkdir /sys/fs/cgroup/init 2>/dev/null; then echo 1 >/sys/fs/cgroup/init/cgroup.procs; fi
		mount -t devpts devpts /dev/pts
		mount -t mqueue mqueue /dev/mqueue 2>/dev/null || true
		exec env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin /bin/sh -e /srv/script
	' sh "$root" $mode || [ $mode = systemd ] # which ends by a signal
done
