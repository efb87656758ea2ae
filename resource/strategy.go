package resource

// Strategy is a way in which Allocate gives a container its devices.
type Strategy string

const (
	// CDICRI puts the names of CDI devices into the field for them in AllocateResponse.
	CDICRI Strategy = "cdi-cri"
	// CDIAnnotations puts the names of CDI devices into annotations, for older kubelets and engines.
	CDIAnnotations Strategy = "cdi-annotations"
	// DeviceSpecs returns device nodes and mounts, for kubelets and engines without CDI.
	DeviceSpecs Strategy = "device-specs"
	// Envvar puts the UUIDs of the devices into NVIDIA_VISIBLE_DEVICES, for NVIDIA's own runtime.
	Envvar Strategy = "envvar"
)

// Strategies returns the strategies.
func Strategies() []string {
	return []string{string(CDICRI), string(CDIAnnotations), string(DeviceSpecs), string(Envvar)}
}
