package cli

import (
	"errors"
)

// ErrorRow returns the exit status and the hint for the errors that it knows. Each program has a table of rows, since
// libraries know neither statuses nor hints.
type ErrorRow func(error) (code Code, hint string, ok bool)

// Sentinel returns the row for errors that wrap target.
func Sentinel(target error, code Code, hint string) ErrorRow {
	return func(err error) (Code, string, bool) { return code, hint, errors.Is(err, target) }
}

// Typed returns the row for errors that are or wrap an error of type E. The hint may depend on the fields of that
// error.
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

// Classify returns err with the exit status and the hint of the first row that matches. An err that already has a
// status stays as it is.
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
