package nvml

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
*/
import "C"

import (
	"errors"
	"runtime"
	"unsafe"
)

// sharedLibrary is a loaded shared library. Two values are equal if they are of the same file.
//
// go-nvml could load the library itself, but it hides the loader's message, and if the library lacks a function,
// calling that function ends the process. So this package loads the library first, to see which functions it has.
type sharedLibrary struct{ handle unsafe.Pointer }

// dlopen loads the library at a path, which must contain a slash. Other libraries do not see its symbols.
func dlopen(path string) (sharedLibrary, error) {
	cpath := C.CString(path)
	defer C.free(unsafe.Pointer(cpath))
	runtime.LockOSThread() // dlerror is per thread
	defer runtime.UnlockOSThread()
	handle := C.dlopen(cpath, C.RTLD_LAZY|C.RTLD_LOCAL)
	if handle == nil {
		return sharedLibrary{}, errors.New(C.GoString(C.dlerror()))
	}
	return sharedLibrary{handle}, nil
}

func (l sharedLibrary) close() { C.dlclose(l.handle) }

// has reports whether the library has a function.
func (l sharedLibrary) has(symbol string) bool {
	name := C.CString(symbol)
	defer C.free(unsafe.Pointer(name))
	return C.dlsym(l.handle, name) != nil
}
