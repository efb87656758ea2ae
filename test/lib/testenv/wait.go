package testenv

import (
	"bytes"
	"sync"
	"testing"
	"time"
)

// patience is how long a test waits before it fails, on a busy machine too.
const patience = time.Minute

// Eventually waits until a condition holds, and ends the test if it never does.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for begin := time.Now(); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Since(begin) > patience {
			t.Fatalf("never: %s", what)
		}
	}
}

// Log is a log that can be read while it is written. The zero value is an empty log.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns what was written.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
