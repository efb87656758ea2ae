package manager

import (
	"context"
	"errors"
	"io"
	"testing"

	"gpu-cdi-plugin/manager/state"
)

func TestTheManagerEndsOnlyIfItIsUnknownWhatTheDiskHas(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		ends bool
	}{
		"a change was not written":             {io.ErrShortWrite, false},
		"a change may or may not be on a disk": {state.ErrBroken, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Manager{}
			m.running, m.stop = context.WithCancelCause(t.Context())
			if err := m.unwritten(c.err); !errors.Is(err, ErrRetry) || !errors.Is(err, c.err) {
				t.Errorf("the answer is %v", err)
			}
			if ended := errors.Is(m.open(), state.ErrBroken); ended != c.ends {
				t.Errorf("the manager has ended: %t", ended)
			}
		})
	}
}
