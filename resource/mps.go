package resource

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// The maximum number of clients of a GPU's MPS server, according to NVIDIA's documentation of MPS, "Client-Server
// Connection Limits". For GPUs since Volta, drivers of CUDA 13.1 and later accept 60; all drivers accept 48.
const (
	maxMPSClients         = 48
	maxMPSClientsPreVolta = 16
)

// volta is the first major compute capability whose MPS clients have their own address spaces and thread limits.
const volta = 7

// mpsLimits returns the share of a GPU that each of n clients gets, or why MPS cannot share the GPU. A GPU that could
// not be read is not checked.
func mpsLimits(p *plan, n int) (*MPSLimits, error) {
	if p.mig != nil {
		return nil, errors.New("MPS cannot share MIG devices")
	}
	limits := &MPSLimits{MemoryBytes: p.device.MemoryBytes >> 20 / uint64(n) << 20}
	if hasThreadLimit(p.gpu.ComputeCapability) {
		limits.ThreadPercent = max(1, 100/n)
	}
	if !p.gpu.Usable() {
		return limits, nil
	}
	maxClients := maxMPSClientsPreVolta
	if hasThreadLimit(p.gpu.ComputeCapability) {
		maxClients = maxMPSClients
	}
	switch {
	case n > maxClients:
		return nil, fmt.Errorf("MPS supports at most %d clients on this GPU (compute capability %s), "+
			"but there are %d replicas", maxClients, cmp.Or(p.gpu.ComputeCapability, "unknown"), n)
	case limits.MemoryBytes == 0:
		return nil, errors.New("its memory size is unknown, so containers cannot be limited to a part of it")
	}
	return limits, nil
}

// hasThreadLimit reports whether GPUs of a compute capability, such as "9.0", can limit the threads of a client.
func hasThreadLimit(capability string) bool {
	major, _, _ := strings.Cut(capability, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= volta
}
