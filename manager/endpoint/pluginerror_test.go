package endpoint

import (
	"errors"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// An error of a plugin is quoted in answers and in the log.
func TestErrorsOfPluginsAreQuoted(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"the plugin's words": {status.Error(codes.NotFound, "no such device"), "no such device"},
		"a long text": {
			status.Error(codes.NotFound, strings.Repeat("x", 100_000)), strings.Repeat("x", maxError-3) + "...",
		},
		"no text":                {status.Error(codes.NotFound, ""), "NotFound"},
		"not an error of a call": {io.EOF, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			got := pluginError(t.Context(), c.err)
			if got.Error() != c.want || status.Code(got) != status.Code(c.err) {
				t.Errorf("%v with the code %s, want %s", got, status.Code(got), c.want)
			}
		})
	}
	if !errors.Is(pluginError(t.Context(), io.EOF), io.EOF) {
		t.Error("an error that is not of gRPC is replaced")
	}
	if err := pluginError(t.Context(), nil); err != nil {
		t.Errorf("no error becomes %v", err)
	}
}
