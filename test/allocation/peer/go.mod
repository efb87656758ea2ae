// The comparison of the allocator with NVIDIA's, https://github.com/NVIDIA/go-gpuallocator. It is a module of its own, so
// that the product does not depend on it.
module gpu-cdi-plugin/test/allocation/peer

go 1.26.0

require (
	github.com/NVIDIA/go-gpuallocator v0.5.0
	gpu-cdi-plugin v0.0.0
)

require (
	github.com/NVIDIA/go-nvlib v0.5.0 // indirect
	github.com/NVIDIA/go-nvml v0.13.4-0 // indirect
	github.com/google/uuid v1.6.0 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
	golang.org/x/sys v0.49.0 // indirect
)

replace gpu-cdi-plugin => ../../..
