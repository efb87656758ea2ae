package doctor

// kind is what all findings with one ID have in common.
type kind struct {
	id       string
	severity Severity
	// wrong is what is wrong, for the documentation.
	wrong string
	why   string
	// fix is the usual fix; a finding may have a better one.
	fix string
}

// catalogue has all kinds of findings. docs/doctor.md is made from it.
var catalogue = []kind{
	{
		"driver-missing", Error, "the driver's libraries are not installed",
		"containers have nothing by which to use a GPU",
		"install the NVIDIA driver, or name its root with --driver-root (that of a driver container is /run/nvidia/driver)",
	},
	{
		"platform", Error, "the host is WSL2 or Tegra (Jetson)",
		"its driver is another one than that for servers and workstations, and this program does not know it",
		"use NVIDIA's toolkit there; installing the NVIDIA driver for Linux breaks the GPU",
	},
	{
		"driver-not-loaded", Error, "the kernel module nvidia is not loaded",
		"no program on the host or in a container can use a GPU",
		"modprobe nvidia; if that fails, dmesg has the reason, and nouveau must be blacklisted if it has the GPUs",
	},
	{
		"driver-version", Error, "the kernel module and the libraries have different versions",
		"every program that uses a GPU fails with a version mismatch, as after an upgrade without a reboot",
		"reboot, or stop what uses the GPUs and reload the kernel modules",
	},
	{
		"driver-damaged", Error, "a library that the driver needs is missing or damaged",
		"CUDA or nvidia-smi does not start in containers",
		"install the NVIDIA driver again",
	},
	{
		"driver-files", Warning, "files of the driver are missing although those beside them exist",
		"containers lack them too, and some programs fail there",
		"install the NVIDIA driver again",
	},
	{
		"driver-link", Warning, "a link to a library of the driver leads nowhere",
		"programs on the host do not find the library; containers get links of their own",
		"ldconfig; if the link stays, install the NVIDIA driver again",
	},
	{
		"driver-fails", Error, "the driver does not start or does not answer",
		"containers cannot use any GPU, and the specs cannot be compared with the GPUs",
		"dmesg shows the messages of NVRM",
	},
	{
		"gpu-none", Error, "the driver has no GPU",
		"there is nothing to give to containers",
		"see whether lspci -d 10de: lists a GPU, and the messages of NVRM in dmesg",
	},
	{
		"gpu-unbound", Warning, "the driver does not have a GPU that is on the bus",
		"the GPU is not offered, and the indices of the others may be lower than before",
		"echo {subject} > /sys/bus/pci/drivers/nvidia/bind; if that fails, dmesg has the reason",
	},
	{
		"gpu-unreadable", Error, "the driver cannot read a GPU",
		"the GPU is left out of specs and is unhealthy for the kubelet",
		"reset the GPU (nvidia-smi --gpu-reset) or reboot; dmesg shows the messages of NVRM",
	},
	{
		"fabricmanager-missing", Error, "a machine with NVSwitches has no fabric manager",
		"CUDA fails to start with error 802 (system not yet initialized)",
		"systemctl enable --now nvidia-fabricmanager",
	},
	{
		"persistenced-missing", Note, "a machine with NVSwitches has no persistence daemon",
		"the driver unloads GPUs that are not in use, so that the first program of each takes seconds to start",
		"systemctl enable --now nvidia-persistenced",
	},
	{
		"module-uvm", Error, "the kernel module nvidia_uvm is not loaded",
		"CUDA does not start: nothing on a server loads the module or makes its device node after a boot",
		"gpu-cdi-plugin device make-nodes",
	},
	{
		"node-missing", Error, "a device node of the driver is missing",
		"containers do not get what it stands for",
		"gpu-cdi-plugin device make-nodes",
	},
	{
		"node-type", Error, "a file in /dev that should be a device node is not a character device",
		"engines refuse to give it to containers, or give them an ordinary file",
		"rm {subject} && gpu-cdi-plugin device make-nodes",
	},
	{
		"node-private", Warning, "only root can open a device node",
		"no other user and no rootless podman can use the GPU",
		"chmod a+rw {subject}, or set NVreg_DeviceFileMode of the module nvidia to 0666",
	},
	{
		"node-number", Error, "a device node has another number than its device",
		"opening it fails, or opens another GPU or another driver's device; it is left out like a missing one",
		"gpu-cdi-plugin device make-nodes",
	},
	{
		"cdi-off", Error, "CDI is off in an engine, or its version does not know CDI",
		"the engine starts containers without the GPUs that were requested, or refuses to start them",
		"turn CDI on in its configuration, and restart it",
	},
	{
		"cdi-unknown", Note, "it is unknown whether CDI is on in an engine",
		"with CDI off, containers get no GPU",
		"turn CDI on in its configuration, and restart it",
	},
	{
		"spec-dir", Error, "an engine does not read the directory in which the spec is",
		"the engine does not find the devices (unresolvable CDI devices)",
		"write the spec into a directory that the engine reads, with --cdi-dir",
	},
	{
		"engine-config", Error, "the configuration of an engine cannot be read",
		"the engine itself does not start with it, or ignores it",
		"repair the file that the problem names",
	},
	{
		"runtime-nvidia", Warning, "the default runtime of an engine is NVIDIA's",
		"it reads NVIDIA_VISIBLE_DEVICES, so an image can take GPUs that its container did not request",
		"make runc or crun the default runtime, or set accept-nvidia-visible-devices-envvar-when-unprivileged = false in " +
			"/etc/nvidia-container-runtime/config.toml",
	},
	{
		"default-devices", Warning, "an engine gives GPUs to each container",
		"containers that did not request a GPU have it, and others' work with it",
		"remove the devices from the file that the problem names; users request them with --device",
	},
	{
		"spec-version", Error, "a spec is of a later CDI version than an engine can read",
		"the engine ignores the file, and does not find its devices (unresolvable CDI devices)",
		"update the engine, or write the spec in an older version",
	},
	{
		"runtime-missing", Error, "a runtime in the configuration of an engine does not exist",
		"containers with it do not start; if it is the default one (otherwise this is a warning), no container does",
		"install the program, or remove the runtime from the configuration of the engine",
	},
	{
		"runtime-behind", Error, "gpu-cdi-runtime runs NVIDIA's runtime",
		"that reads NVIDIA_VISIBLE_DEVICES, so an image can take GPUs that its container did not request",
		"rm {subject} && gpu-cdi-plugin hook install ENGINE",
	},
	{
		"docker-gpus", Note, "docker's --gpus has no program by which it works",
		"docker run --gpus fails; --device does not need it",
		"docker run --device nvidia.com/gpu=all",
	},
	{
		"pids-limit", Error, "containers are allowed fewer processes than the hook has threads",
		"the hook cannot start, so that containers with a GPU do not",
		"raise the limit",
	},
	{
		"config-file", Error, "a configuration file of this product has a mistake",
		"the programs that read it do not start, or go on with the configuration from before",
		"correct the file that the problem names, then restart what reads it",
	},
	{
		"service-failed", Error, "a service of this product fails",
		"specs are no longer kept up to date, and after a reboot there are none",
		"journalctl --unit=UNIT has the reason; then: systemctl restart UNIT",
	},
	{
		"service-stopped", Warning, "a service of this product is enabled and does not run",
		"specs are not kept up to date until the next boot",
		"systemctl start {subject}",
	},
	{
		"kubelet-dir", Error, "the kubelet's directory of pods is there without a kubelet",
		"services of this product that are for hosts without a kubelet do not start, and systemctl start says nothing",
		"rmdir {subject}, and start the services again",
	},
	{
		"spec-missing", Error, "no CDI spec has this host's GPUs",
		"engines find no device to give to containers",
		"gpu-cdi-plugin cdi generate --write",
	},
	{
		"spec-conflict", Error, "two spec files of one directory define the same device",
		"engines offer the device from neither file",
		"remove one of the two files, or give one of them another kind with --cdi-kind",
	},
	{
		"spec-foreign", Error, "only another program's spec has this host's GPUs, although our service should write one",
		"the service leaves names of other files out, so it offers no devices to pods, and watches none",
		"rm {subject} && gpu-cdi-plugin cdi generate --write",
	},
	{
		"nvidia-refresh", Warning, "the service of NVIDIA's toolkit writes a spec beside ours",
		"engines offer a device that two files define from neither, and serve offers none of them to pods",
		"systemctl mask --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service",
	},
	{
		"spec-unreadable", Error, "a spec file or directory cannot be read",
		"engines offer none of its devices; at a directory that they cannot read, they stop",
		"repair it, or remove it: rm {subject}",
	},
	{
		"dir-unsafe", Error, "users other than root can change a directory of specs",
		"who can write there becomes root when the next container starts, and no spec is written there",
		"chown root:root {subject} && chmod go-w {subject}",
	},
	{
		"spec-private", Warning, "only root can read a spec file or directory",
		"rootless engines do not find its devices",
		"chmod a+rX {subject}",
	},
	{
		"spec-stale", Error, "a spec does not match this host",
		"containers do not start, or have other files and devices than the driver's",
		"gpu-cdi-plugin cdi generate --write",
	},
	{
		"spec-unsafe", Error, "users other than root can change a spec file or its hook",
		"who can change it, or a directory above it, becomes root when the next container starts",
		"chown root:root {subject} && chmod go-w {subject}",
	},
	{
		"spec-volatile", Note, "our spec is on a tmpfs, and no service of this program makes it after a boot",
		"after a reboot engines find no device",
		"systemctl enable --now gpu-cdi-watch; without the package, run gpu-cdi-plugin cdi generate --write at each boot",
	},
	{
		"dir-read-only", Error, "a directory of the service is on a read-only file system",
		"specs cannot be written, or what must survive a restart is lost",
		"name a directory that can be written to",
	},
	{
		"state-tmpfs", Warning, "the state directory is on a tmpfs",
		"after a reboot the kubelet does not restart containers whose descriptors are gone",
		"name a directory on a disk with --state-dir",
	},
	{
		"kubelet-socket", Error, "a kubelet runs, and its socket for device plugins does not answer",
		"device plugins cannot register, so pods get no GPUs",
		"name the kubelet's directory with --device-plugin-dir; if it is right, the kubelet's log has the reason",
	},
	{
		"kubelet-stopped", Warning, "the host has a kubelet, and it does not run",
		"no pod is started, and device plugins cannot register",
		"systemctl start kubelet",
	},
	{
		"kubelet-root-dir", Error, "the kubelet has another root directory than the configured one",
		"device plugins that register by the plugin watcher are not found",
		"name the kubelet's directory with --plugins-registry-dir",
	},
	{
		"kubelet-pods", Warning, "the kubelet's PodResources socket is missing",
		"it is unknown which pods have which GPUs: none is cleaned or reset between pods",
		"name the socket with --pod-resources-socket, or turn the kubelet's feature KubeletPodResources on",
	},
	{
		"kubelet-cdi", Warning, "the kubelet does not pass CDI devices of plugins on to the engine",
		"with the strategy cdi-cri pods get no GPUs",
		"use a kubelet of version 1.29 or later with the feature DevicePluginCDIDevices, or the strategy cdi-annotations",
	},
	{
		"plugin-other", Error, "another device plugin offers GPUs of this host",
		"of two plugins with one resource the kubelet uses the one that registered last, and two count each GPU twice",
		"run one of the two on this host: remove the other's DaemonSet or keep it off this host by a label",
	},
	{
		"plugin-gone", Error, "a resource is allocatable although its device plugin is gone",
		"the scheduler places pods here that fail, or start without a GPU",
		"start gpu-cdi-plugin serve (systemctl start gpu-cdi-plugin.service, or its pod), or restart the kubelet so that " +
			"it forgets the resource",
	},
	{
		"hook-file", Error, "a file in a directory of OCI hooks cannot be used",
		"podman and CRI-O start no container while it is there",
		"rm {subject}",
	},
	{
		"hook-program", Error, "the program of an OCI hook is missing or cannot be executed",
		"podman and CRI-O start no container while the hook's file is there",
		"rm {subject}",
	},
	{
		"hook-nvidia", Warning, "an OCI hook of NVIDIA's older toolkit is installed",
		"it reads NVIDIA_VISIBLE_DEVICES, so an image can take GPUs that its container did not request",
		"rm {subject}",
	},
	{
		"hook-unsafe", Error, "users other than root can change a hook",
		"engines run it as root: who can change it, or a directory above it, becomes root when the next container starts",
		"chown root:root {subject} && chmod go-w {subject}",
	},
	{
		"hook-missing", Error, "prestart-hook does not exist or is not executable",
		"no spec can be written, and containers with a spec that names it do not start",
		"install prestart-hook beside gpu-cdi-plugin, or name it with --hook-path",
	},
	{
		"hook-config", Error, "gpu-cdi-runtime and the hook refuse a file of their configuration",
		"containers with the runtime gpu-cdi, or with devices by annotations, do not start",
		"repair {subject} (prestart-hook --help explains its keys); without it the defaults are in effect",
	},
	{
		"hook-noexec", Error, "prestart-hook is on a file system that is mounted with noexec",
		"engines cannot run it, so that containers with a GPU do not start",
		"install -D -m 755 {subject} /usr/libexec/prestart-hook, and name the copy with --hook-path",
	},
	{
		"selinux", Warning, "SELinux does not let containers use devices",
		"opening a device node in a container fails with permission denied",
		"setsebool -P container_use_devices on; or for one container: --security-opt label=disable",
	},
	{
		"inotify", Warning, "there are few inotify instances left",
		"engines and plugins do not notice that specs change, and the kubelet may fail",
		"sysctl -w fs.inotify.max_user_instances=1024, and write that into /etc/sysctl.d/90-inotify.conf",
	},
	{
		"cgroup-hybrid", Warning, "the control groups are of both versions, and crun is installed",
		"crun refuses to start containers in this mode",
		"boot with systemd.unified_cgroup_hierarchy=1, or use runc",
	},
	{
		"cgroup-v1", Error, "the control groups are of version 1, which the kubelet refuses",
		"the kubelet does not start",
		"boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false in the kubelet's configuration",
	},
	{
		"dev-char", Warning, "links in /dev/char to the device nodes are missing, on a node whose kubelet has systemd " +
			"manage control groups",
		"systemctl daemon-reload takes the GPUs away from running containers",
		"make the links with systemd-tmpfiles",
	},
	{
		"try-failed", Error, "a container with a GPU did not start (--try)",
		"users of the engine see the same error",
		"the problem is the engine's message; the other findings may have the reason",
	},
	{
		"try-differs", Error, "a container that was given GPUs cannot use all of them (--try)",
		"programs in containers of this engine fail",
		"the other findings may have the reason",
	},
	{
		"unchecked", Note, "something could not be checked",
		"a fault there is not found",
		"run this as root on the host itself; otherwise check it by hand",
	},
}
