package main

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Who lets go of the signals to become another program knows of every one that did not end the process.
func TestNoSignalIsLostWhenTheyAreLetGo(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for n := range 1000 {
		ctx, e := untilSignal(t.Context())
		if n%2 == 0 {
			if err := unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
		if told := e.letGo(); told != (n%2 == 0) {
			t.Fatalf("round %d: told to end: %t", n, told)
		}
		if n%2 == 0 {
			<-ctx.Done()
		}
		e.close()
	}
}
