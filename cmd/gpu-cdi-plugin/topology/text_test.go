package topology

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestClean(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"a name":                       {"NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"},
		"another script":               {"图形 карта", "图形 карта"},
		"several lines":                {" a\r\n\tb\x00c ", "a b c"},
		"characters that reverse text": {"a\u202egnp.exe", "a\ufffdgnp.exe"},
		"combining characters":         {"a\u0301\u0301", "a\ufffd\ufffd"},
		"bytes that are not UTF-8":     {"a\xff\xfeb", "a\ufffdb"},
		"characters special in XML":    {`<&">'`, `<&">'`},
		"too long":                     {strings.Repeat("x", 500), strings.Repeat("x", longest-3) + "..."},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, clean(c.in)); diff != "" {
				t.Errorf("text (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWrap(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		most int
		want []string
	}{
		"nothing":                 {"", 2, nil},
		"one line":                {"H100 80GB", 2, []string{"H100 80GB"}},
		"between words":           {"H100 80GB HBM3", 2, []string{"H100 80GB", "HBM3"}},
		"a word that is too long": {"a nvmlDeviceGetHandle b", 3, []string{"a", "nvmlDevice…", "b"}},
		"the last line is cut":    {"a lost GPU that says a lot", 2, []string{"a lost GPU", "that says a…"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := wrap(c.in, 75, 10, c.most)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("lines (-want +got):\n%s", diff)
			}
			for _, line := range got {
				if w := textWidth(line, 10, plain); w > 75 {
					t.Errorf("%q is %d wide", line, w)
				}
			}
		})
	}
}
