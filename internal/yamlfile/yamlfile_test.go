package yamlfile

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

type file struct {
	Name   string          `yaml:"name"`
	Count  int             `yaml:"count"`
	On     bool            `yaml:"on-off"`
	Pick   *int            `yaml:"pick"`
	Names  []string        `yaml:"names"`
	Levels []int           `yaml:"levels"`
	Matrix [][]int         `yaml:"matrix"`
	Rules  []rule          `yaml:"rules"`
	Models map[string]rule `yaml:"models"`
	Nodes  map[int]string  `yaml:"nodes"`
	Free   any             `yaml:"free"`
	Below  `                yaml:",inline"`
}

// Below is inlined.
type Below struct {
	Deep rule `yaml:"deep"`
}

type rule struct {
	To []string `yaml:"to"`
	N  int      `yaml:"n"`
}

func TestDecode(t *testing.T) {
	two := 2
	for name, c := range map[string]struct {
		text string
		want file
	}{
		"nothing":           {"", file{}},
		"a comment":         {"# x\n", file{}},
		"null":              {"names:\ncount: ~\n", file{}},
		"lists":             {"names: [a, b]\nlevels: [1, 2]\n", file{Names: []string{"a", "b"}, Levels: []int{1, 2}}},
		"lists with commas": {"names: a, b\nlevels: 1,2\n", file{Names: []string{"a", "b"}, Levels: []int{1, 2}}},
		"lists of one":      {"names: a\nlevels: 7\n", file{Names: []string{"a"}, Levels: []int{7}}},
		"an empty text":     {"names: ''\n", file{Names: []string{}}},
		"lists in lists": {
			"matrix: [[1, 2], '3,4']\nrules: [{to: x,n: 1}]",
			file{Matrix: [][]int{{1, 2}, {3, 4}}, Rules: []rule{{To: []string{"x"}, N: 1}}},
		},
		"a list by an alias": {"name: &a x,y\nnames: *a\n", file{Name: "x,y", Names: []string{"x", "y"}}},
		"a number as text":   {"name: 5\n", file{Name: "5"}},
		"a whole number":     {"count: 64.0\npick: 2\n", file{Count: 64, Pick: &two}},
		"tables": {
			"models: {a: {n: 1}}\nnodes: {0: x}\n",
			file{Models: map[string]rule{"a": {N: 1}}, Nodes: map[int]string{0: "x"}},
		},
		"JSON":                 {`{"names": "a,b", "on-off": true}`, file{Names: []string{"a", "b"}, On: true}},
		"a field of any type":  {"free: {x: [1]}\n", file{Free: map[string]any{"x": []any{1}}}},
		"comma in a list item": {"names: ['a,b']\n", file{Names: []string{"a,b"}}},
	} {
		t.Run(name, func(t *testing.T) {
			var got file
			if _, err := Decode([]byte(c.text), &got, nil); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestDecodeReportsAllProblems(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"no mapping":     {"only text\n", []string{`line 1: want keys and values, got "only text"`}},
		"a list of them": {"- name: a\n", []string{"line 1: want keys and values, got a list"}},
		"two documents":  {"name: a\n---\nname: b\n", []string{"more than one YAML document"}},
		"no YAML":        {"names: [\n", []string{"yaml: line 1: did not find expected node content"}},
		"unknown keys": {
			"nam: a\ndeep: {tto: b}\nother: c\n",
			[]string{
				"line 1: unknown key nam; did you mean name or names?",
				"line 2: unknown key deep.tto; did you mean to?",
				"line 3: unknown key other",
			},
		},
		"another spelling": {
			"on_off: true\n", []string{"line 1: unknown key on_off; did you mean on-off?"},
		},
		"a key twice":                    {"name: a\nname: b\n", []string{"line 2: duplicate key name, first in line 1"}},
		"a number for a list of objects": {"rules: 3\n", []string{`line 1: rules: want a list, got "3"`}},
		"keys for a list": {
			"names: {a: b}\n", []string{"line 1: names: want a list, got keys and values"},
		},
		"a list for a text": {"name: [a]\n", []string{"line 1: name: want text, got a list"}},
		"no numbers": {
			"count: x\nlevels: [1, y]\npick: []\n",
			[]string{
				`line 1: count: want a whole number, got "x"`,
				`line 2: levels[1]: want a whole number, got "y"`,
				"line 3: pick: want a whole number, got a list",
			},
		},
		"no number in a comma list": {"levels: 1,y\n", []string{`line 1: levels[1]: want a whole number, got "y"`}},
		"fractions": {
			"count: 1.5\nlevels: 1,2.5\n",
			[]string{
				`line 1: count: want a whole number, got "1.5"`, `line 2: levels[1]: want a whole number, got "2.5"`,
			},
		},
		"neither true nor false":  {"on-off: maybe\n", []string{`line 1: on-off: want true or false, got "maybe"`}},
		"a key that is no number": {"nodes: {a: b}\n", []string{`line 1: nodes: want a whole number, got "a"`}},
		"below": {
			"models: {m: {n: x}}\nrules: [{n: y}]\ndeep: 4\n",
			[]string{
				`line 1: models.m.n: want a whole number, got "x"`,
				`line 2: rules[0].n: want a whole number, got "y"`,
				`line 3: deep: want keys and values, got "4"`,
			},
		},
		"a merge key": {"deep: {<<: {n: 3}}\n", []string{"line 1: unknown key deep.<<"}},
		"a key twice below a field of any type": {
			"free:\n  x: 1\n  x: 2\n", []string{`line 3: duplicate key x, first in line 2`},
		},
		"what is long": {
			"count: " + strings.Repeat("x", 100) + "\n",
			[]string{`line 1: count: want a whole number, got "` + strings.Repeat("x", 37) + `..."`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got file
			_, err := Decode([]byte(c.text), &got, nil)
			if err == nil {
				t.Fatalf("no error, and %+v", got)
			}
			if diff := cmp.Diff(c.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestDecodeReturnsTheRestBesideProblems(t *testing.T) {
	var got file
	if _, err := Decode([]byte("name: a\nnames: x,y\ncount: no\nother: 1\n"), &got, nil); err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(file{Name: "a", Names: []string{"x", "y"}}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		"names: a,b\nrules: [{to: x}]\n", "deep: &a {<<: *a}\n", "deep: &a [*a]\nnames: *a\n",
		"<<: [{name: a}, 3]\n", "matrix: '1,2'",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var got file
		document, err := Decode(data, &got, nil)
		if err == nil && document == nil {
			t.Error("neither a document nor an error")
		}
		if err != nil && (strings.Contains(err.Error(), "yamlfile.") || strings.Contains(err.Error(), "reflect.")) {
			t.Errorf("the error has a Go type: %v", err)
		}
	})
}

// A document at a limit is read, and one above it is not.
func TestLimits(t *testing.T) {
	lists := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	keys := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "k%d: 1\n", i)
		}
		return b.String()
	}
	// A list of 1,000 values that a second list has 297 times, beside other values. The document, the mapping, its keys
	// and the lists count too.
	values := func(others int) string {
		return "a: &a [" + strings.Repeat("x,", 1_000) + "]\nb: [" + strings.Repeat("*a,", 297) +
			strings.Repeat("x,", others) + "]\n"
	}
	// A text of 640 bytes counts for 11 values.
	texts := func(n int) string {
		return "a: &a " + strings.Repeat("x", 640) + "\nb: [" + strings.Repeat("*a,", n) + "]\n"
	}
	// A mapping of 100 keys that a list has some times.
	mappings := func(key string, n int) string {
		var b strings.Builder
		for i := range 100 {
			fmt.Fprintf(&b, "%s%d: x, ", key, i)
		}
		return "a: &a {" + b.String() + "}\nb: [" + strings.Repeat("*a,", n) + "]\n"
	}
	const (
		manyValues = "it has more than 300000 values, with aliases expanded and long texts counted as several"
		manyKeys   = "line 1: too many keys in one mapping, or too many aliases of a mapping with many keys"
	)
	for name, c := range map[string]struct {
		text, want string
	}{
		"100 levels":               {lists(100), ""},
		"101 levels":               {lists(101), "line 1: it is nested more than 100 levels deep"},
		"3,000 keys":               {keys(3_000), ""},
		"3,001 keys":               {keys(3_001), manyKeys},
		"100 keys 899 times":       {mappings("k", 898), ""},
		"100 keys 900 times":       {mappings("k", 899), manyKeys},
		"100 long keys 449 times":  {mappings(strings.Repeat("k", 64), 448), ""},
		"100 long keys 450 times":  {mappings(strings.Repeat("k", 64), 449), manyKeys},
		"300,000 values":           {values(1_697), ""},
		"300,001 values":           {values(1_698), manyValues},
		"a long text 27,272 times": {texts(27_271), ""},
		"a long text 27,273 times": {texts(27_272), manyValues},
		"two documents":            {"a: 1\n---\nb: 1\n", "more than one YAML document"},
		"a broken document":        {"a: 1\n---\n[\n", "more than one YAML document"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(c.text))
			if got := fmt.Sprint(err); got != c.want && (err != nil || c.want != "") {
				t.Errorf("the error is %q, want %q", got, c.want)
			}
		})
	}
}

// Of many problems the first 1,000 are kept, and 20 of them are in the error.
func TestManyProblems(t *testing.T) {
	for name, text := range map[string]string{
		"equal keys":   strings.Repeat("a: 1\n", 3_000),
		"unknown keys": "rules: [" + strings.Repeat("{x: 1}, ", 3_000) + "]\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decode([]byte(text), &file{}, nil)
			if err == nil || !strings.HasSuffix(err.Error(), "\nand 980 more") || strings.Count(err.Error(), "\n") != 20 {
				t.Errorf("the error is %v", err)
			}
		})
	}
	many := &yaml.TypeError{Errors: slices.Repeat([]string{"line 1: cannot unmarshal !!str `a` into int"}, 3_000)}
	if err := Plain(many); !strings.HasSuffix(err.Error(), "\nand 980 more") {
		t.Errorf("the error is %v", err)
	}
}
