package devcgroup

import "unsafe"

func callFD[T any](command uintptr, attr *T) (uintptr, error) {
	return bpf(command, unsafe.Pointer(attr), unsafe.Sizeof(*attr))
}

func call[T any](command uintptr, attr *T) error {
	_, err := callFD(command, attr)
	return err
}
