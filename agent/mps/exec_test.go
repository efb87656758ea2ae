package mps

import (
	"io"
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

// zeros is a program that does not stop printing.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
