package cli

import (
	"errors"
)

// ErrorRow returns the exit status and the hint of an error that it knows. A program has one table of them, since the
// libraries know neither.
type ErrorRow func(error) (code Code, hint string, ok bool)

// Sentinel is the row of the errors that wrap target.
func Sentinel(target error, code Code, hint string) ErrorRow {
	return func(err error) (Code, string, bool) { return code, hint, errors.Is(err, target) }
}

// Typed is the row of the errors that are, or wrap, an E. Its hint may depend on what the error carries.
func Typed[E error](describe func(E) (Code, string)) ErrorRow {
	return func(err error) (Code, string, bool) {
		e, ok := errors.AsType[E](err)
		if !ok {
			return 0, "", false
		}
		code, hint := describe(e)
		return code, hint, true
	}
}

// Classify returns err with the exit status and the hint of the first row that knows it, unless it carries its own.
func Classify(err error, table []ErrorRow) error {
	if _, own := errors.AsType[*Error](err); own {
		return err
	}
	for _, row := range table {
		if code, hint, ok := row(err); ok {
			return With(code, hint, err)
		}
	}
	return err
}
