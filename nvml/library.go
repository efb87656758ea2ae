package nvml

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/internal/host"
)

// library is the NVML library of the process.
type library struct {
	api   nvml.Interface
	has   func(function string) bool // reports whether the library has a function
	calls calls
	// initialised says that nvmlInit has succeeded since the last nvmlShutdown. Only calls about librarySubject use
	// it, so it needs no lock.
	initialised bool
}

// librarySubject is the subject of calls that initialise NVML and shut it down; see [calls].
const librarySubject = "library"

// process holds the library of this process. There can be only one, since calls of NVML functions are bound to it.
var process struct {
	sync.Mutex
	path    string
	shared  sharedLibrary
	library *library
}

// load loads the library at a path. If the process has loaded a library before, the path must lead to the same one. A
// library is never unloaded, since calls that are bound to it would then crash.
func load(path string) (*library, error) {
	shared, err := loadLibrary(path)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", path, err)
	}
	process.Lock()
	defer process.Unlock()
	if process.library == nil {
		process.path, process.shared = path, shared
		process.library = &library{api: nvml.New(nvml.WithLibraryPath(path)), has: shared.hasFunction}
		return process.library, nil
	}
	defer shared.close() // each dlopen needs its dlclose
	if process.shared != shared {
		return nil, fmt.Errorf("load %s: %w: %s", path, ErrLibraryConflict, process.path)
	}
	return process.library, nil
}

// loadLibrary loads a library and checks that it is NVML: if it lacked a function, calling that function would end the
// process.
func loadLibrary(path string) (sharedLibrary, error) {
	if err := checkLibrary(path); err != nil {
		return sharedLibrary{}, err
	}
	shared, err := dlopen(path)
	if err != nil {
		return sharedLibrary{}, fmt.Errorf("%w: %w", ErrLibraryUnusable, err)
	}
	for _, function := range requiredFunctions() {
		if !shared.hasFunction(function) {
			shared.close()
			return sharedLibrary{}, fmt.Errorf("%w: it has no function %s", ErrLibraryUnusable, function)
		}
	}
	return shared, nil
}

// requiredFunctions returns the functions that are needed to read a GPU. The library of an old driver may lack all
// others.
func requiredFunctions() []string {
	return []string{
		"nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount",
		"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo",
	}
}

// hasFunction reports whether the library has any version of a function. go-nvml calls the newest version.
func (l sharedLibrary) hasFunction(function string) bool {
	for _, suffix := range []string{"", "_v2", "_v3"} {
		if l.has(function + suffix) {
			return true
		}
	}
	return false
}

// InFlight returns the calls of this process into the driver that have not returned, such as "nvmlDeviceGetUUID (GPU
// 3)".
func InFlight() []string {
	process.Lock()
	defer process.Unlock()
	if process.library == nil {
		return nil
	}
	return process.library.calls.inFlight()
}

// invoke calls one function of NVML as a part of the call c. Its error names the function.
func invoke[T any](l *library, c *call, function string, f func() (T, nvml.Return)) (T, error) {
	var none T
	c.enter(function)
	if !l.has(function) {
		return none, &functionError{function, nvml.ERROR_FUNCTION_NOT_FOUND, "not in this version of the library"}
	}
	v, code := f()
	if code != nvml.SUCCESS {
		return none, &functionError{function, code, code.Error()}
	}
	return v, nil
}

// noValue adapts a function that returns only a code, so that invoke can call it.
func noValue(f func() nvml.Return) func() (struct{}, nvml.Return) {
	return func() (struct{}, nvml.Return) { return struct{}{}, f() }
}

// initialise calls nvmlInit unless NVML is initialised already: an earlier nvmlInit may have succeeded after its
// caller had stopped waiting.
func (l *library) initialise(ctx context.Context, h host.Host) error {
	_, err := ask(ctx, &l.calls, librarySubject, 0, func(c *call) (struct{}, error) {
		if l.initialised {
			return struct{}{}, nil
		}
		_, err := invoke(l, c, "nvmlInit", noValue(l.api.Init))
		l.initialised = err == nil
		return struct{}{}, err
	})
	switch {
	case hasCode(err, nvml.ERROR_LIB_RM_VERSION_MISMATCH):
		return fmt.Errorf("%w: the library is %s, the kernel module %s: %w",
			ErrVersionMismatch, l.libraryVersion(ctx), cmp.Or(host.DriverVersion(h), "of an unknown version"), err)
	case hasCode(err, nvml.ERROR_DRIVER_NOT_LOADED) && host.DriverVersion(h) != "":
		return fmt.Errorf("%w: %w", ErrNoControlNode, err)
	}
	return classify(err)
}

// libraryVersion returns the driver version of the library. The library need not be initialised for this. NVML puts
// the CUDA version before the driver version: "13.580.126.09".
func (l *library) libraryVersion(ctx context.Context) string {
	v, err := ask(ctx, &l.calls, librarySubject, 0, func(c *call) (string, error) {
		return invoke(l, c, "nvmlSystemGetNVMLVersion", l.api.SystemGetNVMLVersion)
	})
	if err != nil {
		return "of an unknown version"
	}
	if _, version, ok := strings.Cut(v, "."); ok && strings.Count(version, ".") > 0 {
		return version
	}
	return v
}

// shutdown calls nvmlShutdown.
func (l *library) shutdown(ctx context.Context) error {
	_, err := ask(ctx, &l.calls, librarySubject, 0, func(c *call) (struct{}, error) {
		l.calls.forget() // the handles are invalid after nvmlShutdown
		l.initialised = false
		return invoke(l, c, "nvmlShutdown", noValue(l.api.Shutdown))
	})
	return err
}
