package sim

import (
	"errors"
	"fmt"
)

// The errors that callers distinguish. Each is wrapped with what it is about.
var (
	// ErrUnknownMachine means that no machine has the name.
	ErrUnknownMachine = errors.New("unknown machine")
	// ErrMachineFile means that a machine file does not describe a machine.
	ErrMachineFile = errors.New("malformed machine file")
	// ErrExists means that the directory for a new node has a node already, and Options.Force is not set.
	ErrExists = errors.New("a simulated node exists there")
	// ErrNotEmpty means that the directory for a new node has files that are not a simulated node.
	ErrNotEmpty = errors.New("the directory is not empty and not a simulated node")
	// ErrNotNode means that a directory is not a simulated node.
	ErrNotNode = errors.New("not a simulated node")
	// ErrNoCompiler means that there is no C compiler to compile the simulated library.
	ErrNoCompiler = errors.New("no C compiler, which the simulated library needs")
	// ErrNoCache means that the directory for compiled libraries cannot be created or used.
	ErrNoCache = errors.New("no directory for compiled libraries")
	// ErrNoDeviceNodes means that the process lacks CAP_MKNOD, and Options.PlainNodes is not set.
	ErrNoDeviceNodes = errors.New("no permission to make device nodes")
)

// InvalidError means that a request is invalid: it has a malformed machine file or version, or names a machine, a GPU,
// a MIG profile or a function that does not exist.
type InvalidError struct{ cause error }

// Error returns the text of the cause.
func (e *InvalidError) Error() string { return e.cause.Error() }

// Unwrap returns the cause, which may be ErrUnknownMachine or ErrMachineFile.
func (e *InvalidError) Unwrap() error { return e.cause }

func invalid(format string, args ...any) error { return &InvalidError{fmt.Errorf(format, args...)} }
