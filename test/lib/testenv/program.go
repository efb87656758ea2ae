package testenv

import (
	"os"
	"syscall"
	"testing"
)

// WriteProgram writes a program or a script for a test to run. A process that another goroutine starts meanwhile has
// the open file too until it runs its own program, and the kernel runs no program that a process can write to ("text
// file busy"). So no process is started while the file is open.
func WriteProgram(t testing.TB, path string, data []byte) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
}
