# The package on a host with systemd: it is installed, a kubelet comes, and it is removed.
fail() {
	echo "FAIL: $*"
	systemctl --no-pager --lines=20 status 'gpu-cdi-*'
	exit 1
}
check() { "$@" || fail "$*"; }
await() {
	n=0
	until "$@" >/dev/null 2>&1; do
		n=$((n + 1))
		[ $n -lt 300 ] || fail "$* within 30 s"
		sleep 0.1
	done
}
active() { [ "$(systemctl is-active "$1")" = "$2" ]; }
set -x

cd /srv
check sh -e /srv/guide.sh # what docs/install.md says
await active gpu-cdi-watch.service active
check active gpu-cdi-plugin.service inactive
check grep -q '"/usr/libexec/gpu-cdi-plugin/prestart-hook"' /run/cdi/nvidia.com-gpu.json
# The unit had the driver's nvidia-modprobe make this one.
check test -c /sim/dev/nvidia-uvm
check [ "$(cat /sim/modprobe.log)" = '-u -c 0' ]

# crun may not change settings of the kernel here.
printf '[containers]\ndefault_sysctls = []\n' >/srv/containers.conf
export CONTAINERS_CONF=/srv/containers.conf
check podman --storage-driver vfs --root /srv/storage --runroot /run/storage --runtime crun \
	run --rm --cgroups disabled --network none --device nvidia.com/gpu=0 --rootfs /srv/image \
	/bin/busybox ls -l /dev/nvidia0 /dev/nvidia-uvm

# What it wrote is kept true, from within its sandbox.
before=$(systemctl show -P MainPID gpu-cdi-watch.service)
rm /run/cdi/nvidia.com-gpu.json
await test -e /run/cdi/nvidia.com-gpu.json
check [ "$before" = "$(systemctl show -P MainPID gpu-cdi-watch.service)" ]
check systemctl reload gpu-cdi-watch.service

# An upgrade and a downgrade restart what runs.
for deb in old new; do
	before=$(systemctl show -P MainPID gpu-cdi-watch.service)
	check dpkg -i /srv/$deb.deb
	await active gpu-cdi-watch.service active
	check [ "$before" != "$(systemctl show -P MainPID gpu-cdi-watch.service)" ]
done

# A kubelet comes: the other unit takes over, and can be stopped.
mkdir -p /var/lib/kubelet/device-plugins
await active gpu-cdi-plugin.service active
check active gpu-cdi-watch.service inactive
await test -S /run/gpu-cdi-plugin/control.sock
check gpu-cdi-plugin device cordon 0 --reason noise
check systemctl stop gpu-cdi-plugin.service
check active gpu-cdi-plugin.service inactive
check active gpu-cdi-watch.service inactive
check systemctl start gpu-cdi-plugin.service

# What the administrator has set survives an upgrade.
check systemctl disable --now gpu-cdi-plugin.service
check dpkg -i /srv/new.deb
check active gpu-cdi-plugin.service inactive
check systemctl enable --now gpu-cdi-plugin.service

check dpkg --purge gpu-cdi-plugin
check active gpu-cdi-plugin.service inactive
echo PASS
