package cli

import (
	"context"
	"errors"
)

// Code is a process's exit status.
type Code int

// The exit statuses. They are part of the command line's interface.
const (
	OK          Code = 0
	Failure     Code = 1
	Usage       Code = 2
	Partial     Code = 3   // a part failed
	Differs     Code = 4   // a check found differences
	NoDriver    Code = 10  // no driver, or an unusable one
	NoGPU       Code = 11  // a driver without GPUs
	Locked      Code = 12  // another instance holds the lock
	Unreachable Code = 13  // the kubelet or the manager cannot be reached
	Interrupted Code = 130 // ended by SIGINT or SIGTERM
)

// Error is an error with an exit status and a hint.
type Error struct {
	Code Code
	// Hint says what the user can do about the error, in lower case and without a full stop. May be empty.
	Hint string
	Err  error
}

// Error returns the text of the error without the status and the hint.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the error without the status and the hint.
func (e *Error) Unwrap() error { return e.Err }

// With returns err with a status and a hint, or nil if err is nil.
func With(code Code, hint string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Code: code, Hint: hint, Err: err}
}

// CodeOf returns the exit status of err: its own, Interrupted for a canceled context, otherwise Failure.
func CodeOf(err error) Code {
	var e *Error
	switch {
	case err == nil:
		return OK
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.Canceled):
		return Interrupted
	default:
		return Failure
	}
}

// HintOf returns the hint of err, or "".
func HintOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Hint
	}
	return ""
}
