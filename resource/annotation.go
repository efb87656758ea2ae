package resource

// parentAnnotation begins the keys of ParentAnnotation.
const parentAnnotation = "gpu-cdi-plugin/"

// ParentAnnotation returns the key of the annotation with which an answer to Allocate says of which GPU a MIG device
// is a part; the value is the UUID of the GPU. The kubelet keeps the answer as long as the container has the device,
// also when the MIG device is gone. It merges the answers of several resources, so the key has the UUID of the MIG
// device.
func ParentAnnotation(uuid string) string { return parentAnnotation + uuid }
