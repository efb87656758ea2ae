package conformance

// rules are in the order in which they are checked: each stands on those before it. docs/conformance.md lists them.
var rules = []Rule{
	// Registration.
	{
		"register-in-time", "The plugin registers at kubelet.sock within the time limit.",
		"Until it has registered, the node has no devices, and pods that ask for some are not scheduled.",
		Must, registering(registers),
	},
	{
		"register-serves-first", "The plugin serves at its endpoint before it calls Register.",
		"The kubelet connects before it answers Register, and refuses a plugin that it cannot reach within 10 s.",
		Must, registering(each(servesFirst)),
	},
	{
		"register-version", "Register is called with version v1beta1.",
		"The kubelet refuses every other version, and the resource never appears.",
		Must, registering(each(registersVersion)),
	},
	{
		"register-name", "The resource has the name of an extended resource, such as nvidia.com/gpu.",
		"The kubelet refuses other names: no slash, upper case in the domain, kubernetes.io, more than 63 characters.",
		Must, registering(each(registersName)),
	},
	{
		"register-endpoint", "The endpoint is the name of a socket in the directory of kubelet.sock, not a path.",
		"The kubelet joins the name to its directory: an absolute path does not exist there, and .. leads out of it.",
		Must, registering(each(registersEndpoint)),
	},
	{
		"options-answered", "GetDevicePluginOptions is answered.",
		"The kubelet refuses the registration if it is not, and never asks for devices.",
		Must, each(optionsAnswered),
	},
	{
		"options-agree", "The options in Register are those that GetDevicePluginOptions answers.",
		"The kubelet ignores those in Register, so what is set only there has no effect.",
		Should, registering(each(optionsAgree)),
	},

	// Lists of devices.
	{
		"list-first", "ListAndWatch sends the first list within the time limit.",
		"Until the first list, the node has 0 devices of the resource.",
		Must, each(listsFirst),
	},
	{
		"list-size", "A list has at most 4 MiB.",
		"The kubelet cannot receive more: the stream fails, and all devices are gone.",
		Must, each(listSize),
	},
	{
		"list-id-length", "IDs of devices have 1 to 63 bytes.",
		"It is the limit of the API. The kubelet does not check it, but what reads its answers may.",
		Must, listed(idLength),
	},
	{
		"list-id-characters", "IDs of devices have only letters, digits and - _ . : / @ + =.",
		"IDs end up in environment variables, lists and file names, which others would break.",
		Should, listed(idCharacters),
	},
	{
		"list-id-unique", "No two devices in a list have the same ID.",
		"The kubelet counts a device that is listed as healthy and as unhealthy twice, and can give it only once.",
		Must, listed(idsUnique),
	},
	{
		"list-health", "The health of a device is exactly Healthy or Unhealthy.",
		"The kubelet takes everything else, also healthy in lower case, as unhealthy: pods do not get the device.",
		Must, listed(healthWords),
	},
	{
		"list-topology", "The NUMA nodes of a device are not negative, and none is there twice.",
		"The Topology Manager aligns by these numbers, and rejects pods for a node that does not exist.",
		Must, listed(topologyForm),
	},
	{
		"list-topology-empty", "A device without NUMA nodes has no topology, not an empty one.",
		"The kubelet leaves devices with an empty topology out of GetAllocatableResources.",
		Should, listed(topologyEmpty),
	},
	{
		"list-again", "ListAndWatch sends a list again when its stream was closed and is opened again.",
		"The kubelet opens a new stream after each restart and registration.",
		Must, each(listsReopened),
	},
	{
		"list-stable", "The IDs of the devices are the same in a new stream.",
		"The kubelet keeps allocations by ID: a device with a new name is given to a second pod.",
		Must, each(listsStable),
	},
	{
		"list-twice", "Two ListAndWatch streams at a time each get the list.",
		"While a kubelet starts, its old stream may still be open.",
		Must, each(listsTwice),
	},
	{
		"list-flip", "A device that changes its health is reported within the time limit.",
		"Until then pods get a device that does not work. Checked with --flip.",
		Must, healthFlips,
	},

	// Allocate.
	{
		"allocate-each", "Allocate gives each healthy device alone.",
		"The kubelet may choose any healthy device, and an error fails the pod for good (UnexpectedAdmissionError).",
		Must, allocating(allocateEach),
	},
	{
		"allocate-all", "Allocate gives all healthy devices to one container.",
		"A pod may ask for the whole node.",
		Must, allocating(allocateAll),
	},
	{
		"allocate-count", "Allocate answers once for each container in the request.",
		"The kubelet fails the pod if there is no answer, and the devices stay taken.",
		Must, allocating(allocateCount),
	},
	{
		"allocate-unknown", "Allocate refuses IDs that are not in the list with an error, and goes on.",
		"After a change of the devices the kubelet may ask for one that is gone: the container would start without it.",
		Must, allocating(allocateUnknown),
	},
	{
		"allocate-unhealthy", "Allocate refuses an unhealthy device with an error.",
		"A device may fail between the kubelet's choice and the call: the container would start with a broken device.",
		Should, each(allocateUnhealthy),
	},
	{
		"allocate-empty", "Allocate survives requests without containers or without devices.",
		"A crash takes the devices of the whole node away.",
		Must, each(allocateEmpty),
	},
	{
		"allocate-duplicate", "Allocate gives a device that is named twice in a request once, or refuses it.",
		"Two nodes or mounts at one place fail the start of the container.",
		Should, allocating(allocateTwice),
	},
	{
		"allocate-same", "Allocate answers the same request in the same way.",
		"The kubelet keeps the first answer for restarts of the container: what only the second has is lost.",
		Should, allocating(allocateSame),
	},
	{
		"allocate-concurrent", "Allocate answers 64 calls at a time.",
		"A kubelet admits pods one by one, other device managers need not: a deadlock or a crash stops the node.",
		Must, allocating(allocateConcurrently),
	},
	{
		"allocate-cdi", "Names of CDI devices are qualified, such as nvidia.com/gpu=0.",
		"The container runtime refuses other names, and the container does not start.",
		Must, answered("CDI names", cdiNames),
	},
	{
		"allocate-mounts", "Paths of mounts are absolute, on the host and in the container.",
		"The container runtime refuses others, and the container does not start.",
		Must, answered("mounts", mountPaths),
	},
	{
		"allocate-nodes", "Paths of device nodes are absolute, on the host and in the container.",
		"The container runtime refuses others, and the container does not start.",
		Must, answered("device nodes", nodePaths),
	},
	{
		"allocate-nodes-exist", "The device nodes exist on the host.",
		"The container runtime refuses a node that is missing, and the container does not start.",
		Must, answered("device nodes", nodesExist),
	},
	{
		"allocate-permissions", "The permissions of a device node are one or more of the letters r, w and m.",
		"The container runtime refuses others, or the container cannot open the node.",
		Must, answered("device nodes", permissions),
	},
	{
		"allocate-environment", "Names of environment variables are not empty and have no equals sign.",
		"The container gets another variable than was meant, or does not start.",
		Must, answered("environment variables", environment),
	},

	// GetPreferredAllocation.
	{
		"preferred-answered", "GetPreferredAllocation answers once for each container, up to all devices, in time.",
		"An error fails the pod for good, and a slow answer stops all admission on the node: the kubelet has no deadline.",
		Must, preferring(preferredAnswers),
	},
	{
		"preferred-size", "As many devices are preferred as were asked for.",
		"The kubelet fills up with others, so the choice has no effect.",
		Must, preferred(preferredSize),
	},
	{
		"preferred-available", "Only devices that are available are preferred.",
		"The kubelet ignores others, and chooses in their place.",
		Must, preferred(preferredAvailable),
	},
	{
		"preferred-included", "The devices that must be included are preferred.",
		"The container has them already: what is chosen beside others does not fit.",
		Must, preferred(preferredIncludes),
	},
	{
		"preferred-unique", "No device is preferred twice.",
		"The kubelet counts it once and fills up with another.",
		Must, preferred(preferredUnique),
	},
	{
		"preferred-same", "The same request gets the same devices.",
		"What cannot be repeated cannot be explained or tested.",
		Should, preferring(preferredSame),
	},
	{
		"preferred-impossible", "Requests for more devices than are available, or fewer than must be included, are errors.",
		"An answer hides a mistake of the device manager.",
		Should, preferring(preferredImpossible),
	},

	// PreStartContainer.
	{
		"prestart-answered", "PreStartContainer answers within 30 s.",
		"The kubelet waits no longer, and the container does not start. Checked with --pre-start.",
		Must, prestarting(preStartAnswers),
	},
	{
		"prestart-unknown", "PreStartContainer refuses IDs that are not in the list with an error.",
		"The container would start with a device that was not prepared. Checked with --pre-start.",
		Should, prestarting(preStartUnknown),
	},

	// What the plugin does over time.
	{
		"list-full", "Each list has all devices, not only those that have changed.",
		"A list replaces the one before it: devices that it does not have are gone.",
		Must, each(listsFull),
	},
	{
		goesOn, "The plugin does not crash, and still answers after all these calls.",
		"While it restarts, no pod gets a device, and after crashes the kubelet restarts it ever later.",
		Must, each(wentOn),
	},
	{
		"restart-again", "The plugin registers again when kubelet.sock is created again.",
		"A kubelet that was restarted knows no plugin: all devices are unhealthy until they register.",
		Must, registering(restarted),
	},
	{
		"restart-twice", "The plugin registers with the last of two kubelets that start shortly after one another.",
		"A kubelet that fails at first is restarted at once.",
		Must, registering(restartedTwice),
	},
	{
		"restart-later", "The plugin waits while kubelet.sock is missing, and registers when it is back.",
		"An upgrade of the kubelet takes some time, and a plugin that gives up leaves the node without devices.",
		Must, registering(restartedLater),
	},
	{
		"restart-cleaned", "The plugin creates its socket again when the kubelet has removed it.",
		"A kubelet removes all sockets of the directory when it starts, and cannot connect to one that is gone.",
		Must, registering(restartedCleaning),
	},
	{
		"restart-same", "The devices have the same IDs after restarts of the kubelet.",
		"The kubelet keeps allocations by ID: a device with a new name is given to a second pod.",
		Must, registering(each(restartedSame)),
	},

	// The end. The plugin must be started here.
	{
		"end-exit", "The plugin ends with status 0 within the time limit after SIGTERM.",
		"Kubernetes and systemd kill what does not end, and count another status as a failure.",
		Must, registering(endsAtSignal),
	},
	{
		"end-socket", "The plugin removes its socket when it ends.",
		"A socket that nothing serves looks like a plugin.",
		Should, registering(removesSocket),
	},
}
