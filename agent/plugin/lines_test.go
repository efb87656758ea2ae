package plugin

import (
	"errors"
	"testing"
)

// refusal is an error of several devices in one line, like that of package prepare.
type refusal []error

func (r refusal) Error() string { return r[0].Error() + "; " + r[1].Error() }

func (r refusal) Unwrap() []error { return r }

func TestARefusalHasALineForEachDevice(t *testing.T) {
	one, two := errors.New("GPU-a is not ready"), errors.New("GPU-b is not ready")
	for want, err := range map[string]error{
		"GPU-a is not ready":                     one,
		"GPU-a is not ready\nGPU-b is not ready": refusal{one, two},
	} {
		if got := linesOf(err); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
