package nvml

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// systemTask is the name of the task that opens and closes the driver, and driverTask that of what is read about the
// driver as a whole.
const (
	systemTask = "library"
	driverTask = "driver"
)

// driver is the NVML library of the process, whoever has it open.
type driver struct {
	api nvml.Interface
	// has reports whether the library has a function.
	has func(symbol string) bool
	// path is the file, or empty if it is not known.
	path    string
	tasks   tasks
	answers answers
	// owed is how often nvmlShutdown was left out. NVML counts, and looks at the GPUs anew only after the last one.
	owed atomic.Int32
}

// process is what a process can have only one of: the library that its calls of NVML functions are bound to.
var process struct {
	sync.Mutex
	library sharedLibrary
	driver  *driver
}

// processDriver loads the library, which must be the one that the process has loaded before, if any. It is never
// unloaded: the linker's bindings would then lead nowhere.
func processDriver(name string) (*driver, error) {
	library, err := load(name)
	if err != nil {
		return nil, noDriver(hintFor(err), fmt.Errorf("load %s: %w", name, err))
	}
	process.Lock()
	defer process.Unlock()
	if process.driver == nil {
		process.library = library
		process.driver = &driver{
			api:  nvml.New(nvml.WithLibraryPath(name)),
			has:  library.hasVersion,
			path: library.path(),
		}
		return process.driver, nil
	}
	defer library.close() // which is loaded twice now
	if process.library != library {
		err := fmt.Errorf("load %s: %w: %s", library.path(), ErrLibraryConflict, process.driver.path)
		return nil, noDriver(hintConflict, err)
	}
	return process.driver, nil
}

// UnderWay lists the calls of this process into the driver that have not returned, such as "nvmlDeviceGetUUID (GPU 3)".
func UnderWay() []string {
	process.Lock()
	defer process.Unlock()
	if process.driver == nil {
		return nil
	}
	return process.driver.tasks.underWay()
}

// ask makes one call. The answer is a value or an error that names the function.
func ask[T any](d *driver, t *task, function string, call func() (T, nvml.Return)) (T, error) {
	var none T
	t.calling(function)
	if !d.has(function) {
		return none, &callError{function, nvml.ERROR_FUNCTION_NOT_FOUND, "not in this version of the library"}
	}
	v, code := call()
	if code != nvml.SUCCESS {
		return none, newCallError(function, code)
	}
	return v, nil
}

// askSystem makes a call that is about no GPU, and gives up at the end of ctx.
func askSystem[T any](ctx context.Context, d *driver, function string, call func() (T, nvml.Return)) (T, error) {
	var v, none T
	var err error
	work := func(t *task) { v, err = ask(d, t, function, call) }
	if gaveUp := d.tasks.do(ctx, systemTask, work, nil); gaveUp != nil {
		return none, gaveUp
	}
	return v, err
}

// initialize calls nvmlInit and gives up at the end of ctx. If the driver answers after that, it is shut down again.
func (d *driver) initialize(ctx context.Context) error {
	var err error
	work := func(t *task) { _, err = ask(d, t, "nvmlInit", noValue(d.api.Init)) }
	late := func() {
		if err == nil {
			_ = d.api.Shutdown()
		}
	}
	if gaveUp := d.tasks.do(ctx, systemTask, work, late); gaveUp != nil {
		return gaveUp
	}
	return err
}

// shutdown makes up for those that were left out, too. After an error those that remain are owed still.
func (d *driver) shutdown(ctx context.Context) error {
	for n := 1 + d.owed.Swap(0); n > 0; n-- {
		if _, err := askSystem(ctx, d, "nvmlShutdown", noValue(d.api.Shutdown)); err != nil {
			d.owed.Add(n - 1)
			return err
		}
	}
	d.answers.clear()
	return nil
}

// noValue is a call that answers with nothing but a code, for ask.
func noValue(call func() nvml.Return) func() (struct{}, nvml.Return) {
	return func() (struct{}, nvml.Return) { return struct{}{}, call() }
}
