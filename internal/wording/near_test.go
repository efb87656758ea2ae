package wording

import (
	"slices"
	"testing"
)

func TestSimilarNames(t *testing.T) {
	known := []string{"cdi-kind", "cdi-dir", "driver-root", "dev-root", "mps", "output"}
	for name, want := range map[string][]string{
		"cdi_dir":       {"cdi-dir"},
		"CDI-Dir":       {"cdi-dir"},
		"cdi-dr":        {"cdi-dir"},
		"cdidirr":       {"cdi-dir"},
		"driver-rot":    {"driver-root"},
		"driver":        {"driver-root"},
		"out":           {"output"},
		"mpss":          {"mps"},
		"cdi-din":       {"cdi-dir", "cdi-kind"},
		"abc":           nil,
		"":              nil,
		"no-such-thing": nil,
	} {
		if got := Near(name, known); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
	if got := Question("cdi-din", known); got != "; did you mean cdi-dir or cdi-kind?" {
		t.Errorf("Question returns %q", got)
	}
	if got := Question("abc", known); got != "" {
		t.Errorf("Question returns %q", got)
	}
}
