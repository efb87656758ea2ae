package resource

import (
	"strings"
	"testing"

	"gpu-cdi-plugin/gpu"
)

func TestSelector(t *testing.T) {
	const gpuUUID, migUUID = "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c", "MIG-04cf041a-4404-1ccf-9e70-f139a9b1e23c"
	d := &gpu.Device{Index: 3, UUID: gpuUUID, Name: "NVIDIA H100 80GB HBM3"}
	m := &gpu.MIGDevice{Index: 1, UUID: migUUID}
	for name, tt := range map[string]struct {
		selector  Selector
		gpu, mig  bool
		malformed bool
	}{
		"an index":                       {"3", true, true, false},
		"an index with a leading zero":   {"03", true, true, false},
		"another index":                  {"1", false, false, false},
		"an index that is too large":     {"99999999999999999999", false, false, false},
		"the MIG device's index":         {"3:1", false, true, false},
		"another MIG device's index":     {"3:0", false, false, false},
		"a MIG index on another GPU":     {"1:1", false, false, false},
		"the GPU's UUID":                 {gpuUUID, true, true, false},
		"a UUID in capitals":             {Selector(strings.ToUpper(gpuUUID)), true, true, false},
		"the MIG device's UUID":          {migUUID, false, true, false},
		"another UUID":                   {"GPU-00000000-04cf-1ccf-9e70-f139a9b1e23c", false, false, false},
		"a pattern of the model":         {"*h100*", true, true, false},
		"the model as a node label":      {"NVIDIA-H100-80GB-HBM3", true, true, false},
		"a pattern that is not anchored": {"H100", false, false, false},
		"a UUID cut short":               {"GPU-4404041a", false, false, true},
		"a pattern of UUIDs":             {"MIG-*", false, false, true},
		"nothing":                        {"", false, false, true},
		"blanks":                         {"  ", false, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			if err := tt.selector.Validate(); (err != nil) != tt.malformed {
				t.Errorf("check: %v", err)
			}
			if tt.malformed {
				return
			}
			if got := tt.selector.matches(d, nil); got != tt.gpu {
				t.Errorf("the GPU: %t", got)
			}
			if got := tt.selector.matches(d, m); got != tt.mig {
				t.Errorf("the MIG device: %t", got)
			}
		})
	}
}

func TestPattern(t *testing.T) {
	for name, tt := range map[string]struct {
		pattern Pattern
		name    string
		want    bool
	}{
		"a star is any text":            {"*", "anything at all", true},
		"also none":                     {"*", "", true},
		"and a slash":                   {"a*z", "a/b/z", true},
		"a question mark is one letter": {"1g.?0gb", "1g.10gb", true},
		"and not none":                  {"1g.10gb?", "1g.10gb", false},
		"a dot is a dot":                {"1g.10gb", "1gx10gb", false},
		"a bracket is a bracket":        {"[ab]", "a", false},
		"the whole name":                {"1g.10gb", "1g.10gb+me", false},
		"stars in a row":                {"**b**", "abc", true},
		"the last star tries again":     {"*ab*abc", "ababxababc", true},
		"and gives up":                  {"*ab*abc", "ababxabab", false},
		"letters of all scripts":        {"?", "ß", true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tt.pattern.matches(tt.name); got != tt.want {
				t.Errorf("%q and %q: %t", tt.pattern, tt.name, got)
			}
		})
	}
}

// A table of which prefixes match is the reference. path.Match is none: its star can end within a letter.
func FuzzPattern(f *testing.F) {
	f.Add("*h100*", "NVIDIA H100")
	f.Add("a?c*", "abc")
	f.Add("**", "")
	f.Add("*???0", "\xc000")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		text := []rune(foldName(name))
		match := make([]bool, len(text)+1) // the pattern so far and the first n letters
		match[0] = true
		for _, p := range foldName(pattern) {
			next := make([]bool, len(match))
			for n := range next {
				next[n] = n > 0 && match[n-1] && (p == '?' || p == text[n-1])
				if p == '*' {
					next[n] = match[n] || n > 0 && next[n-1]
				}
			}
			match = next
		}
		if got := Pattern(pattern).matches(name); got != match[len(text)] {
			t.Errorf("%q and %q: %t", pattern, name, got)
		}
	})
}
