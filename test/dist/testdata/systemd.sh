# The package on a host with systemd: it is installed, a kubelet comes, and it is removed.
fail() {
	echo "FAIL: $*"
	systemctl --no-pager --lines=20 status 'gpu-cdi-*' 'device-manager.*'
	exit 1
}
refuse() { ! "$@" || fail "$* succeeds"; }
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
# anew UNIT PID COMMAND... runs a command that has the process of a unit start itself anew. Meanwhile the unit is neither
# stopped nor restarted.
anew() {
	unit=$1 pid=$2
	shift 2
	memory=$(cksum </proc/$pid/auxv)
	check "$@"
	await replaced $pid "$memory"
	await active $unit active
	check [ "$(systemctl show -P NRestarts $unit)" = 0 ]
}
replaced() { [ "$(cksum </proc/$1/auxv)" != "$2" ]; } # it has random addresses
configure() {
	mkdir -p /etc/gpu-cdi-plugin
	echo "$1" >/etc/gpu-cdi-plugin/config.yaml
}
replace_driver() {
	library=$(readlink -f /sim/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1)
	cp -a $library $library.new && mv $library.new $library
}
# stop UNIT stops it without the help of a time limit.
stop() {
	check systemctl stop $1
	check [ "$(systemctl show -P Result $1)" = success ]
}
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

# It starts itself anew for another driver or configuration, and can be reloaded and stopped at once.
pid=$(systemctl show -P MainPID gpu-cdi-watch.service)
anew gpu-cdi-watch.service $pid replace_driver
check systemctl reload gpu-cdi-watch.service
anew gpu-cdi-watch.service $pid sh -e /srv/no-hook.sh # what docs/podman.md says
refuse grep prestart-hook /run/cdi/nvidia.com-gpu.json
check systemctl reload gpu-cdi-watch.service
configure ''
anew gpu-cdi-watch.service $pid systemctl reload gpu-cdi-watch.service
check grep -q prestart-hook /run/cdi/nvidia.com-gpu.json
check systemctl reload gpu-cdi-watch.service

# Metrics need the drop-in of docs/install.md. Without it the spec is kept up to date, and the status says what is missing.
configure 'listen: 127.0.0.1:9400'
anew gpu-cdi-watch.service $pid systemctl reload gpu-cdi-watch.service
rm /run/cdi/nvidia.com-gpu.json
await test -e /run/cdi/nvidia.com-gpu.json
systemctl --no-pager --full --lines 50 status gpu-cdi-watch.service >/srv/status
check grep -q 'Status: .*metrics cannot be served: listen tcp 127.0.0.1:9400: ' /srv/status
check grep -q 'PrivateNetwork=no, IPAddressAllow=localhost and RestrictAddressFamilies=AF_INET AF_INET6' /srv/status
dropin=/etc/systemd/system/gpu-cdi-watch.service.d/metrics.conf
cp /srv/metrics.conf $dropin
check systemctl daemon-reload
check systemctl restart gpu-cdi-watch.service
await busybox wget -q -O /srv/ready http://127.0.0.1:9400/readyz
rm $dropin
check systemctl daemon-reload
configure ''
stop gpu-cdi-watch.service

# A unit holds docker back until there is a spec, and not for ever.
check [ "$(systemctl is-enabled gpu-cdi-await.service)" = disabled ]
printf '[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n' >/run/systemd/system/docker.service
check systemctl daemon-reload
rm /run/cdi/nvidia.com-gpu.json
check systemctl start --no-block gpu-cdi-await.service docker.service
await active gpu-cdi-await.service activating
check active docker.service inactive
check systemctl start gpu-cdi-watch.service
await active docker.service active
check active gpu-cdi-await.service active
stop gpu-cdi-watch.service
stop docker.service
stop gpu-cdi-await.service
rm /run/cdi/nvidia.com-gpu.json
check systemctl start --no-block gpu-cdi-await.service docker.service
await active docker.service active
check active gpu-cdi-await.service failed
check systemctl reset-failed gpu-cdi-await.service
stop docker.service
rm /run/systemd/system/docker.service
check systemctl daemon-reload
check systemctl start gpu-cdi-watch.service

# An upgrade and a downgrade restart what runs.
for deb in old new; do
	before=$(systemctl show -P MainPID gpu-cdi-watch.service)
	check dpkg -i /srv/$deb.deb
	await active gpu-cdi-watch.service active
	check [ "$before" != "$(systemctl show -P MainPID gpu-cdi-watch.service)" ]
done

# The first request, a lease of any user, starts the device manager with the plugin, in the place of the watch.
mkdir /etc/device-manager
echo 'api-group: daemon' >/etc/device-manager/config.yaml
check dpkg -i /srv/manager.deb
check active device-manager.socket active
check active device-manager-leases.socket active
check active device-manager.service inactive
check active gpu-cdi-watch.service active
check [ "$(stat -c '%a %U %G' /run/device-manager/api.sock)" = '660 root root' ]
check [ "$(stat -c '%a %U %G' /run/device-manager/api-leases.sock)" = '666 root root' ]
user() { setpriv --reuid 1000 --regid 1000 --clear-groups "$@"; }
check user gpu-run --wait 0 1 -- sh -c 'echo $(id -u) $CUDA_VISIBLE_DEVICES' >/srv/lease
check grep -q '^1000 GPU-' /srv/lease
check user gpu-run --ids index 1 -- sh -c 'echo $CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES' >/srv/lease
check grep -qx 'PCI_BUS_ID 0' /srv/lease
check active device-manager.service active
check active gpu-cdi-watch.service inactive
refuse user device-manager node
check device-manager node >/srv/node
check grep -Eq '^nvidia.com/gpu +1 +1$' /srv/node

# A command can open its GPU, which no driver serves here, but no other. It is in a scope of its user.
mknod -m 666 /dev/other c 195 7
check user gpu-run 1 -- sh -c '(: <>/sim/dev/nvidia0) 2>&1; (: <>/dev/other) 2>&1; : <>/dev/null && cat /proc/self/cgroup' \
	>/srv/opened
check grep -q 'nvidia0: No such device or address$' /srv/opened
check grep -q 'other: Operation not permitted$' /srv/opened
check grep -Eq '^0::/user.slice/user-1000.slice/lease-[0-9a-z]+.scope$' /srv/opened
rm /dev/other

# That is so also while systemd stops the slice of the user, whose last scope has just ended.
for i in $(seq 20); do
	check user gpu-run 1 -- cat /proc/self/cgroup >/srv/scope
	check grep -Eq '^0::/user.slice/user-1000.slice/lease-[0-9a-z]+.scope$' /srv/scope
done

# What a command leaves behind can open its GPU no longer when the lease has ended.
leases() { [ "$(device-manager leases -o name | wc -l)" = "$1" ]; }
mkfifo -m 666 /srv/go
check user gpu-run 1 -- sh -c '(read -r line </srv/go; (: <>/sim/dev/nvidia0) 2>&1; cat /proc/self/cgroup) &' >/srv/left
await leases 0
echo >/srv/go
await grep -Eq '^0::/user.slice/user-1000.slice/lease-[0-9a-z]+.scope$' /srv/left
check grep -q 'nvidia0: Operation not permitted$' /srv/left

# A container gets the GPU. A command ends with its time, or is found again by the next manager.
check gpu-run 1 -- podman --storage-driver vfs --root /srv/storage --runroot /run/storage --runtime crun \
	run --rm --cgroups disabled --network none --rootfs /srv/image /bin/busybox ls -l /dev/nvidia0
user timeout 60 gpu-run --for 1s 1 -- sleep 1000
check [ $? -eq 143 ]
user gpu-run 1 -- sh -c 'echo runs; exec sleep 1000' >/srv/runs &
await test -s /srv/runs
lease=$(device-manager leases -o name)
check kill -9 "$(systemctl show -P MainPID device-manager.service)"
await leases 1
check [ "$(device-manager leases -o name)" = "$lease" ]
check user device-manager lease end "$lease"
await leases 0

# A drop-in says who may lease.
dropin=/etc/systemd/system/device-manager-leases.socket.d
mkdir $dropin
printf '[Socket]\nSocketMode=0660\nSocketGroup=games\n' >$dropin/group.conf
check systemctl daemon-reload
check systemctl restart device-manager-leases.socket
user gpu-run 1 -- true
check [ $? -eq 125 ]
check setpriv --reuid 1000 --regid 1000 --groups games gpu-run 1 -- true
# Without the unit, only root may.
check systemctl disable --now device-manager-leases.socket
user gpu-run 1 -- true
check [ $? -eq 125 ]
check device-manager node
check gpu-run 1 -- true
user gpu-run 1 -- true
check [ $? -eq 125 ]
rm -r $dropin
check systemctl stop device-manager.service
check systemctl enable --now device-manager-leases.socket
check user gpu-run 1 -- true
await leases 0
cat >/srv/pod.yaml <<-'END'
	apiVersion: v1
	kind: Pod
	metadata: {name: training}
	spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1}}}]}
END
check device-manager admit -f /srv/pod.yaml -o name >/srv/pod
check [ "$(stat -c '%a %U %G' /run/device-manager/pod-resources/kubelet.sock)" = '660 root daemon' ]
check cp /run/cdi/nvidia.com-gpu.json /srv/before.json
rm /run/cdi/nvidia.com-gpu.json
await test -e /run/cdi/nvidia.com-gpu.json
check cmp /srv/before.json /run/cdi/nvidia.com-gpu.json
procs=/sys/fs/cgroup/system.slice/device-manager.service/cgroup.procs
check [ "$(wc -l <$procs)" = 2 ]

# Both end together, and pods keep their devices. So an upgrade of either package restarts both.
restarted() {
	[ "$before" != "$(systemctl show -P MainPID device-manager.service)" ] && active device-manager.service active
}
for how in 'kill -9 $(systemctl show -P MainPID device-manager.service)' 'kill $(grep -v "^$before\$" $procs)' \
	'dpkg -i /srv/new.deb' 'dpkg -i /srv/manager.deb'; do
	before=$(systemctl show -P MainPID device-manager.service)
	eval "check $how"
	await restarted
	check active gpu-cdi-watch.service inactive
	check device-manager node >/srv/node
	check grep -Eq '^nvidia.com/gpu +1 +1$' /srv/node
	check [ "$(device-manager pods -o name)" = "$(cat /srv/pod)" ]
	check [ "$(wc -l <$procs)" = 2 ]
done
# The plugin starts itself anew too.
plugin=$(grep -v "^$(systemctl show -P MainPID device-manager.service)\$" $procs)
anew device-manager.service $plugin replace_driver
configure 'no-hook: true'
anew device-manager.service $plugin kill -HUP $plugin
configure ''
anew device-manager.service $plugin kill -HUP $plugin
await grep -q '"/usr/libexec/gpu-cdi-plugin/prestart-hook"' /run/cdi/nvidia.com-gpu.json
check device-manager node
stop device-manager.service
refuse test -e $procs
check active device-manager.socket active
check active device-manager-leases.socket active
check systemctl start gpu-cdi-watch.service
check device-manager pods
check active gpu-cdi-watch.service inactive
check systemctl start gpu-cdi-watch.service # the later one wins
check active device-manager.service inactive
check device-manager pods

# What a device manager that was started by hand leaves is no kubelet.
check systemctl stop device-manager.socket device-manager-leases.socket
check active device-manager.service inactive
refuse test -e /var/lib/kubelet
GPU_CDI_ROOT=/sim device-manager serve --plugin 'gpu-cdi-plugin serve' &
await device-manager node
check kill $!
wait $!
check test -d /var/lib/kubelet/device-plugins
check systemctl start device-manager.socket device-manager-leases.socket gpu-cdi-watch.service
check active gpu-cdi-watch.service active
check [ "$(device-manager pods -o name)" = "$(cat /srv/pod)" ]
check dpkg --purge device-manager
check active gpu-cdi-watch.service active
rm -r /var/lib/kubelet

# A kubelet comes: the other unit takes over, and can be stopped. No request starts the device manager.
check dpkg -i /srv/manager.deb
mkdir -p /var/lib/kubelet/pods # a kubelet makes device-plugins later
await active gpu-cdi-plugin.service active
check test -d /var/lib/kubelet/device-plugins
check active gpu-cdi-watch.service inactive
check active device-manager.socket inactive
check active device-manager-leases.socket inactive
refuse device-manager node 2>/srv/error
check grep -q '^hint: .* only where there is no /var/lib/kubelet/pods, which a kubelet makes), or name the socket ' /srv/error
check systemctl start device-manager.socket device-manager.service
check active device-manager.socket inactive
check active device-manager.service inactive
check active gpu-cdi-plugin.service active
systemctl --no-pager status device-manager.service >/srv/status
check grep -q 'ConditionPathExists=!/var/lib/kubelet/pods was not met' /srv/status

# If the device manager runs already, the administrator decides when the kubelet gets the GPUs.
check systemctl stop gpu-cdi-plugin.service
rmdir /var/lib/kubelet/pods
check systemctl start gpu-cdi-watch.service device-manager.socket
check device-manager node
mkdir /var/lib/kubelet/pods
check active device-manager.service active
check systemctl start gpu-cdi-plugin.service
check active device-manager.service inactive
check active device-manager.socket inactive
check active device-manager-leases.socket inactive

# A request at a socket that was made before the kubelet came ends in an error, and does not stop the other service.
rmdir /var/lib/kubelet/pods
check systemctl start device-manager.socket
mkdir /var/lib/kubelet/pods
refuse timeout 60 device-manager node
check active device-manager.service inactive
check active gpu-cdi-plugin.service active
check dpkg --purge device-manager
await test -S /run/gpu-cdi-plugin/control.sock
check gpu-cdi-plugin device cordon 0 --reason noise
pid=$(systemctl show -P MainPID gpu-cdi-plugin.service)
anew gpu-cdi-plugin.service $pid replace_driver
check systemctl reload gpu-cdi-plugin.service
for config in 'no-hook: true' ''; do
	configure "$config"
	anew gpu-cdi-plugin.service $pid systemctl reload gpu-cdi-plugin.service
	check systemctl reload gpu-cdi-plugin.service
done
stop gpu-cdi-plugin.service
check active gpu-cdi-plugin.service inactive
check active gpu-cdi-watch.service inactive
check systemctl start gpu-cdi-plugin.service

# What the administrator has set survives an upgrade.
check systemctl disable --now gpu-cdi-plugin.service
check dpkg -i /srv/new.deb
check active gpu-cdi-plugin.service inactive

# The daemon of a GPU that MPS shares runs in its sandbox. The shared memory is mounted once.
mps=/run/gpu-cdi-plugin/mps
mkdir -p /var/lib/gpu-cdi-plugin/devices
for gpu in GPU-1 GPU-2; do
	echo '{"sharing": {"replicas": 2, "mps": {"memoryLimitBytes": 1572864000, "activeThreadPercentage": 50}}}' \
		>/var/lib/gpu-cdi-plugin/devices/$gpu.json
done
for verb in start restart; do
	check systemctl $verb gpu-cdi-mps@GPU-1.service
	await test -S $mps/GPU-1/daemon/status.sock
	check [ "$(stat -c %a $mps/GPU-1/shm)" = 1777 ]
	check [ "$(grep -c "$mps/GPU-1/shm.* - tmpfs" /proc/self/mountinfo)" = 1 ]
	check systemctl stop gpu-cdi-mps@GPU-1.service
done
# One that was taken over can put no link where root's programs follow it, and finds no sockets of theirs.
cat >/srv/hostile <<-'END'
	cd /run/gpu-cdi-plugin/mps/GPU-2
	mv shm daemon/old; rmdir shm; ln -s /srv/target shm
	mv pipe daemon/old; mv daemon ../old
	mv ../GPU-2 ../old; ln -sT /srv/target ../GPU-2; mv ../../mps ../../old
	touch pipe/file daemon/file /dev/shm/file
	find /run -name '*.sock*' -o -name private -o -name bus >daemon/found
	exit 1
END
mkdir -p /srv/target /etc/systemd/system/gpu-cdi-mps@GPU-2.service.d
printf '[Service]\nExecStart=\nExecStart=/bin/sh /srv/hostile\nRestartSec=100ms\n' \
	>/etc/systemd/system/gpu-cdi-mps@GPU-2.service.d/hostile.conf
check systemctl daemon-reload
check systemctl start gpu-cdi-mps@GPU-2.service
restarted() { [ "$(systemctl show -P NRestarts gpu-cdi-mps@GPU-2.service)" -gt 1 ]; }
await restarted
check systemctl stop gpu-cdi-mps@GPU-2.service
check systemctl restart gpu-cdi-mps-shm@GPU-2.service
refuse grep -q /srv/target /proc/self/mountinfo
for name in shm pipe daemon; do
	refuse test -L $mps/GPU-2/$name
	check test -e $mps/GPU-2/$name/file
done
check cmp $mps/GPU-2/daemon/found /dev/null
rm -r /etc/systemd/system/gpu-cdi-mps@GPU-2.service.d

# Nor can the service of the spec, which writes specs and nothing else.
sed -e '/^Condition/d; /^ExecStart/d; /^Restart/d; /^WatchdogSec/d; /^RuntimeDirectory/d' -e 's#^Type=.*#Type=oneshot\
ExecStart=-/bin/systemd-run --wait touch /srv/taken\
ExecStart=-/bin/touch /srv/written /run/cdi/written#' /usr/lib/systemd/system/gpu-cdi-watch.service \
	>/etc/systemd/system/hostile.service
check systemctl daemon-reload
check systemctl start hostile.service
check test -e /run/cdi/written
refuse test -e /srv/taken
refuse test -e /srv/written
rm /run/cdi/written /etc/systemd/system/hostile.service

check systemctl enable --now gpu-cdi-plugin.service

check dpkg --purge gpu-cdi-plugin
check active gpu-cdi-plugin.service inactive
refuse grep -q gpu-cdi-mps /proc/self/mountinfo
rm -r /var/lib/kubelet

# Without packages, the commands of docs/install.md do the same.
cd dist
check sh -e /srv/without.sh
check active gpu-cdi-watch.service active
check test -e /run/cdi/nvidia.com-gpu.json
check user gpu-run 1 -- true
check active device-manager.service active
check sh -e /srv/without.sh # again, for a new version
check sh -e /srv/remove-without.sh
check active gpu-cdi-watch.service inactive
check active device-manager.service inactive
refuse test -e /run/cdi/nvidia.com-gpu.json
rm -r /etc/gpu-cdi-plugin /var/lib/gpu-cdi-plugin /var/lib/device-manager gpu-cdi-plugin_*_linux_amd64
echo PASS
