package proc

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a thread that serves nothing else, and that ends with it. So f may give the thread namespaces of
// its own: processes that it starts and sockets that it opens are in them; goroutines that it starts are not.
func OnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The process's first thread cannot end, and what it is in the process is said to be in. Kept here, it is
			// left out.
			defer runtime.UnlockOSThread()
			done <- OnThread(f)
			return
		}
		// The thread is not unlocked, so that it ends with the goroutine instead of serving others.
		done <- f()
	}()
	return <-done
}
