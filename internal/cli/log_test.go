package cli

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// What others send can be quoted in the log.
func TestALongTextIsShortenedInTheLog(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		var out bytes.Buffer
		long := strings.Repeat("x", 1<<20)
		newLogger(&out, "info", format).Info(long, "value", long, "error", errors.New(long))
		if out.Len() < 3*maxLogged || out.Len() > 3*maxLogged+1000 {
			t.Errorf("%s: the line has %d bytes, want three times %d", format, out.Len(), maxLogged)
		}
	}
}
