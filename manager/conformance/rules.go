package conformance

// rules are in the order in which they are checked: each relies on earlier ones. docs/conformance.md lists the rules,
// and names the files that are given as sources.
var rules = []Rule{
	// Registration.
	{
		"register-in-time", "The plugin registers at kubelet.sock within the time limit.",
		"Until it has registered, the node has no devices, and pods that request them are not scheduled.",
		"Kubernetes documentation, Device Plugins: Device plugin registration",
		Must, registering(registers),
	},
	{
		"register-serves-first", "The plugin serves at its endpoint before it calls Register.",
		"The kubelet connects before it answers Register, and refuses a plugin that it cannot reach within 10 s.",
		"Kubernetes documentation, Device Plugins: Device plugin implementation",
		Must, registering(each(servesFirst)),
	},
	{
		"register-version", "Register is called with version v1beta1.",
		"The kubelet refuses every other version, and the resource never appears.",
		"api.proto: RegisterRequest.version",
		Must, registering(each(registersVersion)),
	},
	{
		"register-name", "The resource has the name of an extended resource, such as nvidia.com/gpu.",
		"The kubelet refuses other names: no slash, upper case in the domain, kubernetes.io, more than 63 characters.",
		"api.proto: RegisterRequest.resource_name",
		Must, registering(each(registersName)),
	},
	{
		"register-endpoint", "The endpoint is the name of a socket in the directory of kubelet.sock, not a path.",
		"The kubelet joins the name to its directory: an absolute path does not exist there, and .. leads out of it.",
		"api.proto: RegisterRequest.endpoint",
		Must, registering(each(registersEndpoint)),
	},

	// Registration by a socket in the registry.
	{
		"watcher-in-time", "The plugin serves a socket in the registry within the time limit.",
		"Until the kubelet finds it, the node has no devices, and pods that request them are not scheduled.",
		"pluginregistration api.proto: Registration",
		Must, watching(foundInTime),
	},
	{
		"watcher-info", "The plugin answers GetInfo at its socket in the registry.",
		"The kubelet waits 1 s, and does not register a plugin that has not answered.",
		"pluginregistration api.proto: Registration.GetInfo",
		Must, watching(each(infoAnswered)),
	},
	{
		"watcher-type", "GetInfo returns the type DevicePlugin.",
		"The kubelet treats the plugin as another kind of plugin, or refuses it.",
		"pluginregistration api.proto: PluginInfo.type",
		Must, introducing(infoType),
	},
	{
		"watcher-name", "GetInfo returns the name of an extended resource, such as nvidia.com/gpu.",
		"The kubelet refuses other names: no slash, upper case in the domain, kubernetes.io, more than 63 characters.",
		"pluginregistration api.proto: PluginInfo.name",
		Must, introducing(infoName),
	},
	{
		"watcher-versions", "GetInfo returns v1beta1 among the supported versions.",
		"The kubelet refuses the plugin, and the resource never appears.",
		"pluginregistration api.proto: PluginInfo.supported_versions",
		Must, introducing(infoVersions),
	},
	{
		"watcher-endpoint", "The endpoint that GetInfo returns is an absolute path or empty.",
		"The kubelet connects to the endpoint as it is: a relative path leads to another place, or nowhere.",
		"pluginregistration api.proto: PluginInfo.endpoint",
		Must, introducing(infoEndpoint),
	},
	{
		"watcher-notified", "The plugin answers NotifyRegistrationStatus.",
		"The kubelet regards the registration as failed, and tries again.",
		"pluginregistration api.proto: Registration.NotifyRegistrationStatus",
		Must, introducing(notifyAnswered),
	},
	{
		"watcher-refused", "The plugin still answers GetInfo after a NotifyRegistrationStatus of a failure.",
		"The kubelet tries again, since the failure may be temporary. A plugin that has exited cannot register then.",
		"kubelet: pluginmanager/reconciler",
		Must, introducing(infoAfterFailure),
	},

	// Options.
	{
		"options-answered", "GetDevicePluginOptions is answered.",
		"Otherwise the kubelet refuses the registration, and never calls ListAndWatch.",
		"api.proto: DevicePlugin.GetDevicePluginOptions",
		Must, each(optionsAnswered),
	},
	{
		"options-agree", "Register has the same options as GetDevicePluginOptions.",
		"The kubelet ignores the options in Register, so options that are set only there have no effect.",
		"kubelet: devicemanager/manager.go, PluginConnected",
		Should, registering(each(optionsAgree)),
	},

	// Lists of devices.
	{
		"list-first", "ListAndWatch sends the first list within the time limit.",
		"Until the first list, the node has 0 devices of the resource.",
		"api.proto: DevicePlugin.ListAndWatch",
		Must, each(listsFirst),
	},
	{
		"list-size", "A list has at most 4 MiB.",
		"The kubelet cannot receive more: the stream fails, and all devices are gone.",
		"kubelet: devicemanager/plugin/v1beta1/client.go, dial (the default of gRPC)",
		Must, each(listSize),
	},
	{
		"list-id-length", "IDs of devices have 1 to 63 bytes.",
		"The API sets this limit. The kubelet does not check it, but clients of PodResources may.",
		"api.proto: Device.ID",
		Must, listed(idLength),
	},
	{
		"list-id-characters", "IDs of devices have only letters, digits and - _ . : / @ + =.",
		"IDs end up in environment variables, lists and file names, which other characters would break.",
		"no specification: advice",
		Should, listed(idCharacters),
	},
	{
		"list-id-unique", "No two devices in a list have the same ID.",
		"The kubelet counts a device that is listed as healthy and as unhealthy twice, and can give it only once.",
		"api.proto: Device.ID",
		Must, listed(idsUnique),
	},
	{
		"list-health", "The health of a device is exactly Healthy or Unhealthy.",
		"The kubelet takes everything else, also healthy in lower case, as unhealthy: pods do not get the device.",
		"api.proto: Device.health, and constants.go",
		Must, listed(healthWords),
	},
	{
		"list-topology", "The NUMA nodes of a device are not negative, and none is listed twice.",
		"The Topology Manager aligns by these numbers, and rejects pods for a node that does not exist.",
		"Kubernetes documentation, Device Plugins: integration with the Topology Manager",
		Must, listed(topologyForm),
	},
	{
		"list-topology-empty", "A device without NUMA nodes has no topology, not an empty one.",
		"The kubelet leaves devices with an empty topology out of GetAllocatableResources.",
		"kubelet: GetAllocatableResources. The documentation allows both",
		Should, listed(topologyEmpty),
	},
	{
		"list-again", "ListAndWatch sends the list again when its stream was closed and is reopened.",
		"The kubelet opens a new stream after each restart and registration.",
		"kubelet: devicemanager/plugin/v1beta1/client.go, Run",
		Must, each(listsReopened),
	},
	{
		"list-stable", "The IDs of the devices are the same in a new stream.",
		"The kubelet keeps allocations by ID: a device with a new name is given to a second pod.",
		"api.proto: Device.ID",
		Must, each(listsStable),
	},
	{
		"list-twice", "Two ListAndWatch streams at a time each get the list.",
		"While a kubelet starts, its old stream may still be open.",
		"kubelet: devicemanager/plugin/v1beta1/handler.go, connectClient",
		Must, each(listsTwice),
	},
	{
		"list-flip", "A device that changes its health is reported within the time limit.",
		"Until then pods get a device that does not work. Checked with --flip.",
		"api.proto: DevicePlugin.ListAndWatch",
		Must, healthFlips,
	},

	// Allocate.
	{
		"allocate-each", "Allocate gives each healthy device by itself.",
		"The kubelet may choose any healthy device, and an error fails the pod for good (UnexpectedAdmissionError).",
		"api.proto: AllocateRequest",
		Must, allocating(allocateEach),
	},
	{
		"allocate-all", "Allocate gives all healthy devices to one container.",
		"A pod may request all devices of the node.",
		"api.proto: AllocateRequest",
		Must, allocating(allocateAll),
	},
	{
		"allocate-count", "Allocate answers once for each container in the request.",
		"The kubelet fails the pod if there is no answer, and the devices stay taken.",
		"kubelet: devicemanager/manager.go, allocateContainerResources",
		Must, allocating(allocateCount),
	},
	{
		"allocate-unknown", "Allocate refuses IDs that are not in the list with an error, and the plugin keeps running.",
		"After a change of the devices the kubelet may request one that is gone: the container would start without it.",
		"api.proto: AllocateResponse, Failure Handling",
		Must, allocating(allocateUnknown),
	},
	{
		"allocate-unhealthy", "Allocate refuses an unhealthy device with an error.",
		"A device may fail between the kubelet's choice and the call: the container would start with a broken device.",
		"api.proto: AllocateResponse, Failure Handling",
		Should, each(allocateUnhealthy),
	},
	{
		"allocate-empty", "Allocate survives requests without containers or without devices.",
		"A crash takes the devices of the whole node away.",
		"no specification: any client can send them",
		Must, each(allocateEmpty),
	},
	{
		"allocate-duplicate", "Allocate gives a device that is named twice in a request once, or refuses it.",
		"With two device nodes or mounts at one path the container does not start.",
		"no specification: advice",
		Should, allocating(allocateTwice),
	},
	{
		"allocate-same", "Allocate answers the same request in the same way.",
		"The kubelet keeps the first answer for restarts of the container: what only a later answer has is lost.",
		"kubelet: devicemanager/pod_devices.go, deviceRunContainerOptions",
		Should, allocating(allocateSame),
	},
	{
		"allocate-concurrent", "Allocate answers 64 concurrent calls.",
		"A kubelet admits pods one by one, but other device managers may not: a deadlock or a crash stops the node.",
		"gRPC: a server is called concurrently",
		Must, allocating(allocateConcurrently),
	},
	{
		"allocate-cdi", "Names of CDI devices are qualified, such as nvidia.com/gpu=0.",
		"The container runtime refuses other names, and the container does not start.",
		"api.proto: CDIDevice.name",
		Must, answered("CDI names", cdiNames),
	},
	{
		"allocate-mounts", "Paths of mounts are absolute, on the host and in the container.",
		"The container runtime refuses other paths, and the container does not start.",
		"OCI runtime specification, config.md: Mounts",
		Must, answered("mounts", mountPaths),
	},
	{
		"allocate-nodes", "Paths of device nodes are absolute, on the host and in the container.",
		"The container runtime refuses other paths, and the container does not start.",
		"OCI runtime specification, config-linux.md: Devices",
		Must, answered("device nodes", nodePaths),
	},
	{
		"allocate-nodes-exist", "The device nodes exist on the host.",
		"The container runtime refuses a missing device node, and the container does not start.",
		"api.proto: DeviceSpec.host_path",
		Must, answered("device nodes", nodesExist),
	},
	{
		"allocate-permissions", "The permissions of a device node are one or more of the letters r, w and m.",
		"The container runtime refuses other permissions, or the container cannot open the device node.",
		"api.proto: DeviceSpec.permissions",
		Must, answered("device nodes", permissions),
	},
	{
		"allocate-environment", "Names of environment variables are not empty and have no equals sign.",
		"The container gets a wrong variable, or does not start.",
		"OCI runtime specification, config.md: Process, env",
		Must, answered("environment variables", environment),
	},

	// GetPreferredAllocation.
	{
		"preferred-answered", "GetPreferredAllocation answers in time and once for each container, also for all devices.",
		"An error fails the pod for good, and a slow answer stops all admission on the node: the kubelet has no deadline.",
		"api.proto: DevicePlugin.GetPreferredAllocation",
		Must, preferring(preferredAnswers),
	},
	{
		"preferred-size", "As many devices are preferred as were requested.",
		"The kubelet fills up with other devices, so the preference has no effect.",
		"api.proto: ContainerPreferredAllocationRequest.allocation_size",
		Must, preferred(preferredSize),
	},
	{
		"preferred-available", "Only devices that are available are preferred.",
		"The kubelet ignores unavailable devices, and chooses others itself.",
		"api.proto: ContainerPreferredAllocationRequest.available_deviceIDs",
		Must, preferred(preferredAvailable),
	},
	{
		"preferred-included", "The devices that must be included are preferred.",
		"The container already has them: a choice that suits other devices does not suit these.",
		"api.proto: ContainerPreferredAllocationRequest.must_include_deviceIDs",
		Must, preferred(preferredIncludes),
	},
	{
		"preferred-unique", "No device is preferred twice.",
		"The kubelet counts it once and fills up with another.",
		"api.proto: ContainerPreferredAllocationRequest.allocation_size",
		Must, preferred(preferredUnique),
	},
	{
		"preferred-same", "The same request gets the same devices.",
		"A choice that cannot be repeated cannot be explained or tested.",
		"no specification: advice",
		Should, preferring(preferredSame),
	},
	{
		"preferred-impossible", "Requests for more devices than are available, or fewer than must be included, are errors.",
		"An answer without an error hides a fault of the device manager.",
		"api.proto: PreferredAllocationRequest",
		Should, preferring(preferredImpossible),
	},

	// PreStartContainer.
	{
		"prestart-answered", "PreStartContainer answers within 30 s.",
		"The kubelet waits no longer, and the container does not start. Checked with --pre-start.",
		"constants.go: KubeletPreStartContainerRPCTimeoutInSecs",
		Must, prestarting(preStartAnswers),
	},
	{
		"prestart-unknown", "PreStartContainer refuses IDs that are not in the list with an error.",
		"The container would start with a device that was not prepared. Checked with --pre-start.",
		"no specification: advice",
		Should, prestarting(preStartUnknown),
	},

	// Behaviour of the plugin over time.
	{
		"list-full", "Each list has all devices, not only those that have changed.",
		"A list replaces the one before it: devices that it does not have are gone.",
		"api.proto: ListAndWatchResponse",
		Must, each(listsFull),
	},
	{
		goesOn, "The plugin does not crash, and still answers after all these calls.",
		"While it restarts, no pod gets a device, and the kubelet waits longer after each crash.",
		"Kubernetes documentation, Device Plugins: Device plugin implementation",
		Must, each(wentOn),
	},
	{
		"restart-again", "The plugin registers again when kubelet.sock is created again.",
		"A kubelet that was restarted knows no plugin: all devices are unhealthy until they register.",
		"Kubernetes documentation, Device Plugins: Handling kubelet restarts",
		Must, registering(restarted),
	},
	{
		"restart-twice", "The plugin registers with the last of two kubelets that start shortly after one another.",
		"A kubelet that fails at first is restarted at once.",
		"Kubernetes documentation, Device Plugins: Handling kubelet restarts",
		Must, registering(restartedTwice),
	},
	{
		"restart-later", "The plugin waits while kubelet.sock is missing, and registers when it is back.",
		"An upgrade of the kubelet takes some time, and a plugin that gives up leaves the node without devices.",
		"Kubernetes documentation, Device Plugins: Handling kubelet restarts",
		Must, registering(restartedLater),
	},
	{
		"restart-cleaned", "The plugin creates its socket again when the kubelet has removed it.",
		"A kubelet removes all sockets of the directory when it starts, and cannot connect to one that is gone.",
		"Kubernetes documentation, Device Plugins: Handling kubelet restarts",
		Must, registering(restartedCleaning),
	},
	{
		"restart-same", "The devices have the same IDs after restarts of the kubelet.",
		"The kubelet keeps allocations by ID: a device with a new name is given to a second pod.",
		"api.proto: Device.ID",
		Must, registering(each(restartedSame)),
	},
	{
		"watcher-again", "The plugin makes its socket again when the registry was removed and made again.",
		"Until it does, the kubelet has lost the plugin, and its devices are unhealthy.",
		"no specification: advice",
		Should, watching(registryAgain),
	},

	// The end of the plugin, which the checks must have started.
	{
		"end-exit", "The plugin ends with status 0 within the time limit after SIGTERM.",
		"Kubernetes and systemd kill a process that does not end, and treat any other status as a failure.",
		"Kubernetes documentation, Pod Lifecycle: Termination of Pods",
		Must, endsAtSignal,
	},
	{
		"end-socket", "The plugin removes its socket when it ends.",
		"A socket that nothing serves looks like a plugin.",
		"no specification: advice",
		Should, removesSocket,
	},
}
