package resource

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// How many clients a GPU's MPS server takes: NVIDIA's documentation of MPS, "Client-Server Connection Limits". Drivers
// of CUDA 13.1 and later take 60 since Volta; 48 work with all.
const (
	mpsClients         = 48
	mpsClientsOfOldest = 16
)

// volta is the major compute capability from which on clients have GPU address spaces and limits of their own.
const volta = 7

// mpsLimits is the part of a GPU that each of n clients gets, or why it cannot be shared by MPS. Of a GPU that cannot be
// read now it knows less, and takes what was known.
func mpsLimits(p *plan, n, sharedMiB int) (*MPSLimits, error) {
	if p.mig != nil {
		return nil, errors.New("MIG devices cannot be shared by MPS")
	}
	limits := &MPSLimits{
		MemoryBytes:       p.device.MemoryBytes >> 20 / uint64(n) << 20,
		SharedMemoryBytes: uint64(sharedMiB) << 20 * uint64(n),
	}
	if hasThreadLimit(p.gpu.ComputeCapability) {
		limits.ThreadPercent = max(1, 100/n)
	}
	if !p.gpu.Usable() {
		return limits, nil
	}
	most := mpsClientsOfOldest
	if hasThreadLimit(p.gpu.ComputeCapability) {
		most = mpsClients
	}
	switch {
	case n > most:
		return nil, fmt.Errorf("MPS takes at most %d clients on a GPU of compute capability %s, and there are %d replicas",
			most, known(p.gpu.ComputeCapability), n)
	case limits.MemoryBytes == 0:
		return nil, errors.New("its memory is not known, so that no container could be held to a part of it")
	}
	return limits, nil
}

// hasThreadLimit reports whether GPUs of a compute capability, such as "9.0", can hold a client to a part of the threads.
func hasThreadLimit(capability string) bool {
	major, _, _ := strings.Cut(capability, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= volta
}

func known(capability string) string {
	if capability == "" {
		return "that is not known"
	}
	return capability
}
