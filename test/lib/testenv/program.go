package testenv

import (
	"os"
	"syscall"
	"testing"
)

// WriteProgram writes a program or script for a test to run. No process is started while the file is open: until it
// runs its own program, it would have the file open too, and the kernel runs no program that is open for writing ("text
// file busy").
func WriteProgram(t testing.TB, path string, data []byte) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
}
