# The package on a host where systemd does not run: an image, or a container.
fail() {
	echo "FAIL: $*"
	exit 1
}
check() { "$@" || fail "$*"; }
refuse() { ! "$@" || fail "$* succeeds"; }
link=/etc/systemd/system/multi-user.target.wants/gpu-cdi-watch.service
set -x

# NVIDIA's refresh is there: the package says so.
mkdir -p /etc/cdi && touch /etc/cdi/nvidia.yaml /lib/systemd/system/nvidia-cdi-refresh.path
check dpkg -i /srv/old.deb 2>/tmp/message
check grep -q 'systemctl mask --now nvidia-cdi-refresh.path; rm -f /etc/cdi/nvidia.yaml' /tmp/message
rm -r /etc/cdi /lib/systemd/system/nvidia-cdi-refresh.path
check test -L $link
check gpu-cdi-plugin --root /sim device make-nodes
check gpu-cdi-plugin --root /sim cdi generate --write
check gpu-cdi-plugin hook install podman >/dev/null

# The path of the hook stays, and what it is configured for.
for deb in new old new; do
	check dpkg -i /srv/$deb.deb 2>/tmp/message
	refuse grep NVIDIA /tmp/message
	check test -x /usr/libexec/gpu-cdi-plugin/prestart-hook
	check test -e /etc/containers/oci/gpu-cdi-plugin.d/precreate.json
	check test -e /run/cdi/nvidia.com-gpu.json
done
check test -e /usr/share/man/man1/gpu-cdi-plugin-cdi-watch.1.gz

# It stays where engines still need the hook.
record=/var/lib/gpu-cdi-plugin/hook-install.json
cp $record /tmp/record
echo '{' >$record
refuse dpkg --remove gpu-cdi-plugin
check test -x /usr/libexec/gpu-cdi-plugin/prestart-hook
check gpu-cdi-plugin --version
cp /tmp/record $record

# Specs that still name the hook are listed.
other=/run/cdi/example.com-gpu.json
check sed 's#nvidia.com/gpu#example.com/gpu#' /run/cdi/nvidia.com-gpu.json >$other
check dpkg --remove gpu-cdi-plugin 2>/tmp/message
check grep -q "Remove them: $other" /tmp/message
rm $other
check dpkg -i /srv/new.deb
check gpu-cdi-plugin hook install podman >/dev/null

# An administrator's choice survives a removal, and not a purge.
rm $link
check dpkg --remove gpu-cdi-plugin 2>/tmp/message
refuse grep -q 'Remove them' /tmp/message
refuse test -e /etc/containers/oci/gpu-cdi-plugin.d
refuse test -e /run/cdi/nvidia.com-gpu.json
refuse test -e /usr/libexec/gpu-cdi-plugin
check dpkg -i /srv/new.deb
refuse test -L $link
mkdir -p /etc/gpu-cdi-plugin /var/lib/gpu-cdi-plugin/devices /run/gpu-cdi-plugin
touch /etc/gpu-cdi-plugin/config.yaml
# A container still has the shared memory of MPS.
shm=/run/gpu-cdi-plugin/mps/GPU-1/shm
mkdir -p $shm /srv/shm
check mount -t tmpfs gpu-cdi-mps $shm
check mount --bind $shm /srv/shm
touch $shm/cuda.shm
check dpkg --purge gpu-cdi-plugin
refuse test -e /run/gpu-cdi-plugin
check test -e /srv/shm/cuda.shm
umount /srv/shm && rmdir /srv/shm
check dpkg -i /srv/new.deb
check test -L $link
check dpkg --purge gpu-cdi-plugin

# A DaemonSet keeps what it has in the same directories.
check dpkg -i /srv/new.deb
bin=/var/lib/gpu-cdi-plugin/bin
mkdir -p $bin
cp /usr/bin/gpu-cdi-plugin /usr/libexec/gpu-cdi-plugin/prestart-hook $bin
check $bin/gpu-cdi-plugin --root /sim cdi generate --write
check $bin/gpu-cdi-plugin hook install podman live >/dev/null
check dpkg --purge gpu-cdi-plugin 2>/tmp/message
refuse grep -q 'Remove them' /tmp/message
check test -e $bin/prestart-hook
check test -e /etc/containers/oci/gpu-cdi-plugin.d/precreate.json
check test -e /run/cdi/nvidia.com-gpu.json
# If engines run the package's hook, they no longer do.
check dpkg -i /srv/new.deb
check gpu-cdi-plugin hook install podman live >/dev/null
check dpkg --purge gpu-cdi-plugin
refuse test -e /etc/containers/oci/gpu-cdi-plugin.d/precreate.json
check test -e /run/cdi/nvidia.com-gpu.json
rm -r /var/lib/gpu-cdi-plugin /run/cdi/nvidia.com-gpu.json
socket=/etc/systemd/system/sockets.target.wants/device-manager.socket
leases=/etc/systemd/system/sockets.target.wants/device-manager-leases.socket
check dpkg -i /srv/manager.deb
check device-manager --version
check gpu-run --help
check test -L $socket
check test -L $leases
check test -e /usr/share/man/man1/gpu-run.1.gz
check test -e /usr/share/bash-completion/completions/gpu-run
mkdir -p /etc/device-manager /var/lib/device-manager
check dpkg --purge device-manager
refuse test -L $socket
refuse test -L $leases
refuse test -e /etc/device-manager
refuse test -e /var/lib/device-manager

# The rpm does the same. Its presets enable, and nothing starts.
if command -v rpm >/dev/null; then
	rpm="rpm --dbpath /srv/rpm"
	check $rpm --nodeps -i /srv/new.rpm
	check test -L $link
	check gpu-cdi-plugin --root /sim cdi generate --write
	check gpu-cdi-plugin hook install podman >/dev/null
	check $rpm --nodeps -U --replacepkgs /srv/new.rpm
	check test -e /etc/containers/oci/gpu-cdi-plugin.d/precreate.json
	check $rpm -V --nodeps gpu-cdi-plugin
	check $rpm -e gpu-cdi-plugin
	refuse test -e /etc/containers/oci/gpu-cdi-plugin.d
	refuse test -e /run/cdi/nvidia.com-gpu.json
	refuse test -L $link
	check $rpm --nodeps -i /srv/manager.rpm
	check gpu-run --help
	check test -L $socket
	check test -L $leases
	check $rpm -V --nodeps device-manager
	check $rpm -e device-manager
	refuse test -L $socket
	refuse test -L $leases
	rm -r /srv/rpm /var/lib/gpu-cdi-plugin
fi

# The scripts leave this root alone when they are for another one.
mkdir -p /tmp/other/var/lib/dpkg/info /tmp/other/var/lib/dpkg/updates && touch /tmp/other/var/lib/dpkg/status
other="dpkg --root=/tmp/other --force-script-chrootless --force-depends"
check $other -i /srv/new.deb
check test -L /tmp/other$link
refuse test -L $link
check $other --purge gpu-cdi-plugin
refuse test -L /tmp/other$link
check $other -i /srv/manager.deb
check test -L /tmp/other$socket
check test -L /tmp/other$leases
refuse test -L $socket
check $other --purge device-manager
refuse test -L /tmp/other$socket
refuse test -L /tmp/other$leases
echo PASS >/media/log
