package main

import (
	"errors"

	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/lock"
)

// errorTable gives the libraries' errors their exit status and the hint what to do about them. The first row that
// matches counts.
var errorTable = []errorRow{
	sentinel(lock.ErrHeld, exit.Locked, "stop the other instance first; fuser, given the lock's path, names its process"),
}

// errorRow returns the exit status and the hint of an error that it knows.
type errorRow func(error) (code exit.Code, hint string, ok bool)

// sentinel is the row of the errors that wrap target.
func sentinel(target error, code exit.Code, hint string) errorRow {
	return func(err error) (exit.Code, string, bool) { return code, hint, errors.Is(err, target) }
}

// typed is the row of the errors that are, or wrap, an E.
//
//nolint:unused // for errors whose hint needs what they carry
func typed[E error](describe func(E) (exit.Code, string)) errorRow {
	return func(err error) (exit.Code, string, bool) {
		e, ok := errors.AsType[E](err)
		if !ok {
			return 0, "", false
		}
		code, hint := describe(e)
		return code, hint, true
	}
}

// classify returns err with the exit status and the hint of the table, unless it carries its own.
func classify(err error) error {
	if _, own := errors.AsType[*exit.Error](err); own {
		return err
	}
	for _, row := range errorTable {
		if code, hint, ok := row(err); ok {
			return exit.With(code, hint, err)
		}
	}
	return err
}
