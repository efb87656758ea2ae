package endpoint

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// An error of a plugin is quoted in answers and in the log.
func TestALongErrorOfAPluginIsShortened(t *testing.T) {
	got := short(status.Error(codes.NotFound, strings.Repeat("x", 100_000)))
	if s := status.Convert(got); s.Code() != codes.NotFound || len(s.Message()) != maxError {
		t.Errorf("the error has the code %s and %d bytes", s.Code(), len(s.Message()))
	}
	if err := errors.New("short"); !errors.Is(short(err), err) {
		t.Error("a short error is replaced")
	}
	if err := short(nil); err != nil {
		t.Errorf("no error becomes %v", err)
	}
}
