#!/bin/sh
# Makes a throw-away root over that of this machine, and runs a script in it, with systemd as process 1 or without.
# Runs in a mount namespace of its own. All that is written lands in DIR/upper.
# usage: boot.sh DIR SCRIPT [systemd]   DIR has a directory files, which is copied into the root
set -eu
dir=$1 script=$2 systemd=${3:-}
mount --make-rprivate /
mount -t tmpfs tmpfs "$dir"/scratch
mkdir "$dir"/scratch/upper "$dir"/scratch/work
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/scratch/upper,workdir=$dir/scratch/work" "$dir"/root
root=$dir/root
mkdir -p "$root"/run "$root"/old
for path in etc/gpu-cdi-plugin var/lib/gpu-cdi-plugin etc/device-manager var/lib/device-manager var/lib/kubelet; do
	rm -rf "${root:?}/$path"
done
# Manual pages are not indexed: that takes half a minute.
mount -t tmpfs tmpfs "$root"/var/lib/man-db
for name in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$name"; done
for name in null zero full random urandom tty fuse; do
	[ ! -e /dev/$name ] || { : >"$root/dev/$name" && mount --bind /dev/$name "$root/dev/$name"; }
done
mkdir "$root"/dev/pts "$root"/dev/shm
mount -t sysfs -o ro sysfs "$root"/sys
mount --bind "$dir"/out "$root"/media
cp -a "$dir"/files/. "$root"/
cp "$script" "$root"/tmp/script

if [ ! "$systemd" ]; then
	mount -t proc proc "$root"/proc
	exec chroot "$root" /bin/sh /tmp/script
fi

# systemd starts what the script needs, then the script, and ends.
units=$root/etc/systemd/system
mkdir -p "$units"
cp "$root"/tmp/script "$root"/srv/script
cat >"$units"/test.service <<-'END'
	[Unit]
	Requires=basic.target
	After=basic.target
	[Service]
	Type=oneshot
	StandardOutput=file:/media/log
	StandardError=file:/media/log
	ExecStart=/bin/sh /srv/script
	ExecStopPost=/bin/systemctl --no-block --force poweroff
END
printf '[Unit]\nRequires=test.service\n' >"$units"/test.target
ln -sf test.target "$units"/default.target
exec unshare --mount --pid --uts --ipc --net --cgroup --fork --kill-child /bin/sh -eu -c '
	mount -t proc proc "$1"/proc
	mount --bind "$1"/proc/sys "$1"/proc/sys
	mount -o remount,bind,ro "$1"/proc/sys # the settings of the kernel are those of this machine
	mount -t cgroup2 cgroup2 "$1"/sys/fs/cgroup
	cd "$1"
	pivot_root . old
	umount -l /old
	exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /sbin/init --log-target=null --show-status=no
' sh "$root"
