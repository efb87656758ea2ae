package resource

// Strategy is a way to give a container its devices.
type Strategy string

const (
	// CDICRI names CDI devices in AllocateResponse's field for them.
	CDICRI Strategy = "cdi-cri"
	// CDIAnnotations names CDI devices in annotations, for older kubelets and engines.
	CDIAnnotations Strategy = "cdi-annotations"
	// DeviceSpecs returns device nodes and mounts, for kubelets and engines without CDI.
	DeviceSpecs Strategy = "device-specs"
	// Envvar names the devices in NVIDIA_VISIBLE_DEVICES, for NVIDIA's own runtime.
	Envvar Strategy = "envvar"
)

// Strategies returns the strategies.
func Strategies() []string {
	return []string{string(CDICRI), string(CDIAnnotations), string(DeviceSpecs), string(Envvar)}
}
