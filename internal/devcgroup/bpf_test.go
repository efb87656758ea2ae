package devcgroup

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func callFD[T any](command uintptr, attr *T) (uintptr, error) {
	return bpf(command, unsafe.Pointer(attr), unsafe.Sizeof(*attr))
}

func call[T any](command uintptr, attr *T) error {
	_, err := callFD(command, attr)
	return err
}

// blinded is prologue(gpu) and denyAll, read back with sysctl net.core.bpf_jit_harden=2 on Linux 6.18.
var blinded = []instruction{
	{0x61, 0x12, 0, 0},
	{0xbf, 0x23, 0, 0},
	{0xb4, 0x0b, 0, -1096450955},
	{0xa4, 0x0b, 0, -1096449142},
	{0x5c, 0xb3, 0, 0},
	{0x74, 0x02, 0, 16},
	{0x61, 0x14, 4, 0},
	{0x61, 0x15, 8, 0},
	{0xb7, 0x0b, 0, -1145391212},
	{0xa7, 0x0b, 0, -1145391210},
	{0x5d, 0xb3, 17, 0},
	{0xb7, 0x0b, 0, -990878808},
	{0xa7, 0x0b, 0, -990878869},
	{0x5d, 0xb4, 14, 0},
	{0xb7, 0x0b, 0, -1826493358},
	{0xa7, 0x0b, 0, -1826493355},
	{0x5d, 0xb5, 11, 0},
	{0xbf, 0x20, 0, 0},
	{0xb4, 0x0b, 0, 636378134},
	{0xa4, 0x0b, 0, -636378129},
	{0x5c, 0xb0, 0, 0},
	{0xb7, 0x0b, 0, 315216955},
	{0xa7, 0x0b, 0, 315216955},
	{0x5d, 0xb0, 4, 0},
	{0xb7, 0x0b, 0, 2099744993},
	{0xa7, 0x0b, 0, 2099744992},
	{0xbf, 0xb0, 0, 0},
	{0x95, 0x00, 0, 0},
	{0xaf, 0x00, 0, 0},
	{0x95, 0x00, 0, 0},
}

// TestHardenedKernel guards hosts that harden BPF: what is read back there does not load as it is.
func TestHardenedKernel(t *testing.T) {
	dir := makeCgroup(t, true)
	if _, err := loadProgram(blinded); err == nil {
		t.Error("the instructions load as they are, so the test shows nothing")
	}
	attach(t, dir, unblind(blinded), unix.BPF_F_ALLOW_MULTI)
	if got := accesses(t, dir, 'c'); got != "rwb" {
		t.Errorf("access %q", got)
	}
	if got := accesses(t, dir, 'b'); got != "" {
		t.Errorf("access %q to the block device", got)
	}
}
