package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

// Plugins, drivers and files choose names. None of them controls the terminal that a table is read on, or its lines.
func TestTablesEscapeNames(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"a title of the window":       {"d0\x1b]0;owned\a", `d0\x1b]0;owned\a`},
		"a C1 control character":      {"d0\u009b2J", `d0\u009b2J`},
		"a byte that is no character": {"d0\x9b2J", "d0\ufffd2J"},
		"text from right to left":     {"d0\u202e1", `d0\u202e1`},
		"another column":              {"d0\tHealthy", `d0\tHealthy`},
		"another line":                {"d0\nd1", "d0 d1"},
		"letters of any language":     {"GPU für ß 型", "GPU für ß 型"},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			testenv.Must(t, (&Table{Rows: [][]string{{"r", c.in, "Healthy"}}}).Write(&b, false, true))
			if want := "r   " + c.want + "   Healthy\n"; b.String() != want {
				t.Errorf("got %q, want %q", b.String(), want)
			}
		})
	}
	var b bytes.Buffer
	if err := (&Table{Legend: "why\n\x1b[2J\n"}).Write(&b, false, false); err != nil || b.String() != "why\n\\x1b[2J\n" {
		t.Errorf("the text below a table: %q, %v", b.String(), err)
	}
}

func TestYAMLHasTheValuesOfJSON(t *testing.T) {
	v := map[string]any{
		"text": "13.0", "yes": "on", "null": "null", "line": "a\nb", "empty": "", "colon": "a: b", "number": 1.5,
		"whole": 1 << 53, "list": []any{"x"}, "none": []any{}, "map": map[string]any{"k": true}, "nothing": nil,
	}
	var asJSON, asYAML bytes.Buffer
	testenv.Must(t, errors.Join(printJSON(&asJSON, v), printYAML(&asYAML, v)))
	var fromYAML any
	testenv.Must(t, yaml.Unmarshal(asYAML.Bytes(), &fromYAML))
	again, err := json.MarshalIndent(fromYAML, "", "  ")
	testenv.Must(t, err)
	if diff := cmp.Diff(asJSON.String(), string(again)+"\n"); diff != "" {
		t.Errorf("JSON and YAML differ (-json +yaml):\n%s\nYAML:\n%s", diff, &asYAML)
	}
}
