package pod

// manifest has the fields of a v1.Pod (k8s.io/api v0.37) in the parts that are read. Fields of the type any are
// ignored.
type manifest struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
	Spec       spec     `yaml:"spec"`
	Status     any      `yaml:"status"`
}

type metadata struct {
	Name      string `yaml:"name"`
	Namespace string `yaml:"namespace"`
	UID       string `yaml:"uid"`

	GenerateName               string `yaml:"generateName"`
	Annotations                any    `yaml:"annotations"`
	CreationTimestamp          any    `yaml:"creationTimestamp"`
	DeletionGracePeriodSeconds any    `yaml:"deletionGracePeriodSeconds"`
	DeletionTimestamp          any    `yaml:"deletionTimestamp"`
	Finalizers                 any    `yaml:"finalizers"`
	Generation                 any    `yaml:"generation"`
	Labels                     any    `yaml:"labels"`
	ManagedFields              any    `yaml:"managedFields"`
	OwnerReferences            any    `yaml:"ownerReferences"`
	ResourceVersion            any    `yaml:"resourceVersion"`
	SelfLink                   any    `yaml:"selfLink"`
}

type spec struct {
	InitContainers []container `yaml:"initContainers"`
	Containers     []container `yaml:"containers"`
	RestartPolicy  string      `yaml:"restartPolicy"`
	Resources      resources   `yaml:"resources"`
	ResourceClaims []any       `yaml:"resourceClaims"`

	EphemeralContainers []ephemeralContainer `yaml:"ephemeralContainers"`
	Overhead            map[string]string    `yaml:"overhead"`

	ActiveDeadlineSeconds         any `yaml:"activeDeadlineSeconds"`
	Affinity                      any `yaml:"affinity"`
	AutomountServiceAccountToken  any `yaml:"automountServiceAccountToken"`
	DNSConfig                     any `yaml:"dnsConfig"`
	DNSPolicy                     any `yaml:"dnsPolicy"`
	EnableServiceLinks            any `yaml:"enableServiceLinks"`
	EvictionResponders            any `yaml:"evictionResponders"`
	HostAliases                   any `yaml:"hostAliases"`
	HostIPC                       any `yaml:"hostIPC"`
	HostNetwork                   any `yaml:"hostNetwork"`
	HostPID                       any `yaml:"hostPID"`
	HostUsers                     any `yaml:"hostUsers"`
	Hostname                      any `yaml:"hostname"`
	HostnameOverride              any `yaml:"hostnameOverride"`
	ImagePullSecrets              any `yaml:"imagePullSecrets"`
	NodeName                      any `yaml:"nodeName"`
	NodeSelector                  any `yaml:"nodeSelector"`
	OS                            any `yaml:"os"`
	PreemptionPolicy              any `yaml:"preemptionPolicy"`
	Priority                      any `yaml:"priority"`
	PriorityClassName             any `yaml:"priorityClassName"`
	ReadinessGates                any `yaml:"readinessGates"`
	RuntimeClassName              any `yaml:"runtimeClassName"`
	SchedulerName                 any `yaml:"schedulerName"`
	SchedulingGates               any `yaml:"schedulingGates"`
	SchedulingGroup               any `yaml:"schedulingGroup"`
	SecurityContext               any `yaml:"securityContext"`
	ServiceAccount                any `yaml:"serviceAccount"`
	ServiceAccountName            any `yaml:"serviceAccountName"`
	SetHostnameAsFQDN             any `yaml:"setHostnameAsFQDN"`
	ShareProcessNamespace         any `yaml:"shareProcessNamespace"`
	Subdomain                     any `yaml:"subdomain"`
	TerminationGracePeriodSeconds any `yaml:"terminationGracePeriodSeconds"`
	Tolerations                   any `yaml:"tolerations"`
	TopologySpreadConstraints     any `yaml:"topologySpreadConstraints"`
	Volumes                       any `yaml:"volumes"`
}

type container struct {
	Name          string    `yaml:"name"`
	RestartPolicy string    `yaml:"restartPolicy"`
	Resources     resources `yaml:"resources"`

	Args                     any `yaml:"args"`
	Command                  any `yaml:"command"`
	Env                      any `yaml:"env"`
	EnvFrom                  any `yaml:"envFrom"`
	Image                    any `yaml:"image"`
	ImagePullPolicy          any `yaml:"imagePullPolicy"`
	Lifecycle                any `yaml:"lifecycle"`
	LivenessProbe            any `yaml:"livenessProbe"`
	Ports                    any `yaml:"ports"`
	ReadinessProbe           any `yaml:"readinessProbe"`
	ResizePolicy             any `yaml:"resizePolicy"`
	RestartPolicyRules       any `yaml:"restartPolicyRules"`
	SecurityContext          any `yaml:"securityContext"`
	StartupProbe             any `yaml:"startupProbe"`
	Stdin                    any `yaml:"stdin"`
	StdinOnce                any `yaml:"stdinOnce"`
	TerminationMessagePath   any `yaml:"terminationMessagePath"`
	TerminationMessagePolicy any `yaml:"terminationMessagePolicy"`
	TTY                      any `yaml:"tty"`
	VolumeDevices            any `yaml:"volumeDevices"`
	VolumeMounts             any `yaml:"volumeMounts"`
	WorkingDir               any `yaml:"workingDir"`
}

type ephemeralContainer struct {
	container `yaml:",inline"`

	TargetContainerName any `yaml:"targetContainerName"`
}

// resources has quantities by resource.
type resources struct {
	Limits   map[string]string `yaml:"limits"`
	Requests map[string]string `yaml:"requests"`

	Claims []any `yaml:"claims"`
}
