package sim

import (
	"errors"
	"fmt"
)

// The errors that callers distinguish. Each is wrapped with its subject.
var (
	// ErrUnknownMachine is that there is no machine of that name.
	ErrUnknownMachine = errors.New("unknown machine")
	// ErrMachineFile is that a machine file does not describe a machine.
	ErrMachineFile = errors.New("malformed machine file")
	// ErrExists is that the directory of a new node has one already, and Options.Force is not set.
	ErrExists = errors.New("a simulated node exists there")
	// ErrNotEmpty is that the directory of a new node has files that are not a simulated node.
	ErrNotEmpty = errors.New("the directory is not empty and not a simulated node")
	// ErrNotNode is that a directory is not a simulated node.
	ErrNotNode = errors.New("not a simulated node")
	// ErrNoCompiler is that there is no C compiler, which the simulated library needs.
	ErrNoCompiler = errors.New("no C compiler, which the simulated library needs")
	// ErrNoCache is that the directory for compiled libraries cannot be made or used.
	ErrNoCache = errors.New("no directory for compiled libraries")
	// ErrNoDeviceNodes is that the process lacks CAP_MKNOD, and Options.PlainNodes is not set.
	ErrNoDeviceNodes = errors.New("no permission to make device nodes")
)

// InvalidError is a request that cannot be met as it stands: a malformed machine file or version, or a machine, a GPU,
// a MIG profile or a function that does not exist.
type InvalidError struct{ cause error }

// Error says what cannot be met.
func (e *InvalidError) Error() string { return e.cause.Error() }

// Unwrap returns the cause, which may be ErrUnknownMachine or ErrMachineFile.
func (e *InvalidError) Unwrap() error { return e.cause }

func invalid(format string, args ...any) error { return &InvalidError{fmt.Errorf(format, args...)} }
