package mps

import (
	"io"
	"os/exec"
	"strings"
	"testing"
)

// os/exec copies a program's output with io.Copy.
func TestAnswersAreLimited(t *testing.T) {
	for size, exceeded := range map[int]bool{maxAnswer: false, maxAnswer + 1: true, 100 * maxAnswer: true} {
		var b limitedBuffer
		_, err := io.Copy(&b, io.LimitReader(zeros{}, int64(size)))
		if b.exceeded != exceeded || (err != nil) != exceeded || len(b.String()) > maxAnswer {
			t.Errorf("%d bytes: exceeded %t, error %v, %d bytes stored", size, b.exceeded, err, len(b.String()))
		}
	}
}

// The argument is JSON, which would replace other bytes.
func TestPathsMustBeUTF8(t *testing.T) {
	const bad = "/a\xff"
	for name, c := range map[string]*control{
		"directory":   {dir: bad},
		"program":     {program: Program{Path: bad}},
		"root":        {program: Program{Root: bad}},
		"search path": {program: Program{SearchPath: []string{"/bin", bad}}},
		"library":     {program: Program{Libraries: map[string]string{"l": bad}}},
		"SONAME":      {program: Program{Libraries: map[string]string{bad: "/l"}}},
	} {
		if err := c.setUp(&exec.Cmd{}, true); err == nil || !strings.Contains(err.Error(), `"/a\xff" is not UTF-8`) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (&control{dir: "/ä"}).setUp(&exec.Cmd{}, true); err != nil {
		t.Error(err)
	}
}

// zeros is a program that does not stop printing.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
