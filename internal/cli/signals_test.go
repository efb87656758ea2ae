package cli

import (
	"context"
	"runtime"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"golang.org/x/sys/unix"
)

// A process that releases the signals to become another program must know of each that did not end it.
func TestNoSignalIsLostAtTheRelease(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for n := range 1000 {
		ctx, end := context.WithCancelCause(t.Context())
		release := endAtSignal(end)
		if n%2 == 0 {
			testenv.Must(t, unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGTERM))
		}
		if signalled := release(); signalled != (n%2 == 0) {
			t.Fatalf("round %d: signalled: %t", n, signalled)
		}
		if ended := ctx.Err() != nil; ended != (n%2 == 0) {
			t.Fatalf("round %d: the context has ended: %t", n, ended)
		}
		if release() != (n%2 == 0) {
			t.Fatalf("round %d: the second release reports something else", n)
		}
		end(nil)
	}
}
