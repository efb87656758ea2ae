package inject

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestRequested(t *testing.T) {
	many := make([]string, 100_000)
	for i := range many {
		many[i] = fmt.Sprintf("nvidia.com/gpu=%d", i)
	}
	for name, tc := range map[string]struct {
		config string
		want   []string
		err    string // a part of the error; empty for none
	}{
		"no annotations":          {`{"ociVersion": "1.0.2"}`, nil, ""},
		"other annotations":       {annotated(`"a": "nvidia.com/gpu=0", "xcdi.k8s.io/a": "x", "cdi.k8s.io": "x"`), nil, ""},
		"other annotations' type": {`{"annotations": {"a": 1}}`, nil, ""},
		"null":                    {`{"annotations": null}`, nil, ""},
		"one device":              {annotated(`"cdi.k8s.io/a": "nvidia.com/gpu=0"`), []string{"nvidia.com/gpu=0"}, ""},
		"several, in the order of the keys": {
			annotated(`"cdi.k8s.io/b": "nvidia.com/gpu=2", "cdi.k8s.io/a": "nvidia.com/gpu=1,a.b/c=d:1"`),
			[]string{"nvidia.com/gpu=1", "a.b/c=d:1", "nvidia.com/gpu=2"},
			"",
		},
		"the same twice": {
			annotated(`"cdi.k8s.io/b": "nvidia.com/gpu=1", "cdi.k8s.io/a": "nvidia.com/gpu=1,nvidia.com/gpu=1"`),
			[]string{"nvidia.com/gpu=1"},
			"",
		},
		// JSON has several spellings of one text, and Go, and so runc, takes keys in any case.
		"an escaped slash": {annotated(`"cdi.k8s.io\/a": "nvidia.com\/gpu=0"`), []string{"nvidia.com/gpu=0"}, ""},
		"another case": {
			`{"Annotations": {"cdi.k8s.io/a": "nvidia.com/gpu=0"}}`, []string{"nvidia.com/gpu=0"}, "",
		},
		"the environment alone": {
			`{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "cdi.k8s.io/a=nvidia.com/gpu=0"]}}`, nil, "",
		},
		"no name":          {annotated(`"cdi.k8s.io/a": ""`), nil, `annotation "cdi.k8s.io/a": device ""`},
		"a space":          {annotated(`"cdi.k8s.io/a": "a.b/c=1, a.b/c=2"`), nil, `" a.b/c=2": want VENDOR/CLASS=NAME`},
		"a bare name":      {annotated(`"cdi.k8s.io/a": "0"`), nil, `device "0"`},
		"traversal":        {annotated(`"cdi.k8s.io/a": "../../etc/cdi=0"`), nil, `device "../../etc/cdi=0"`},
		"traversal behind": {annotated(`"cdi.k8s.io/a": "a.b/c=../../d"`), nil, `device "a.b/c=../../d"`},
		"a line break":     {annotated(`"cdi.k8s.io/a\n": "a.b/c=0\n"`), nil, `"cdi.k8s.io/a\n": device "a.b/c=0\n"`},
		"not UTF-8":        {annotated("\"cdi.k8s.io/a\": \"a.b/c=\xff\""), nil, "want VENDOR/CLASS=NAME"},
		"a number":         {annotated(`"cdi.k8s.io/a": 0`), nil, `annotation "cdi.k8s.io/a" is not a text`},
		"a long name":      {annotated(`"cdi.k8s.io/a": "a.b/c=` + strings.Repeat("d", 999) + `"`), nil, "the limit is 255"},
		"100,000 devices": {
			annotated(`"cdi.k8s.io/a": "` + strings.Join(many, ",") + `"`), nil, "more than 1024 devices",
		},
		"a list":              {`[]`, nil, "not an object"},
		"a list of those":     {`{"annotations": ["cdi.k8s.io/a"]}`, nil, "not an object"},
		"not JSON":            {`{"annotations": `, nil, "read the annotations"},
		"nothing":             {``, nil, "read the annotations"},
		"another text behind": {`{} {}`, nil, "read the annotations"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := requested([]byte(tc.config))
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			checkError(t, err, tc.err)
			if err != nil && (len(err.Error()) > 1000 || strings.Contains(err.Error(), "\n")) {
				t.Errorf("not one short line: %v", err)
			}
		})
	}
}

// annotated is a configuration with these annotations.
func annotated(annotations string) string { return `{"annotations": {` + annotations + `}}` }

// checkError fails the test unless the error contains a text, or is nil for none.
func checkError(t *testing.T, err error, want string) {
	t.Helper()
	if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
		t.Errorf("got the error %v, want %q", err, want)
	}
}

func FuzzRequested(f *testing.F) {
	f.Add([]byte(annotated(`"cdi.k8s.io/a": "nvidia.com/gpu=0,a.b/c=d"`)))
	f.Add([]byte(`{"Annotations": {"cdi.k8s.io/\u0061": null}}`))
	f.Fuzz(func(t *testing.T, config []byte) {
		names, err := requested(config)
		if err != nil && names != nil {
			t.Fatalf("got %q and the error %v", names, err)
		}
		if len(names) > maxDevices {
			t.Errorf("%d names", len(names))
		}
		for _, name := range names {
			if checkName(name) != nil || strings.ContainsAny(name, " ,\n\\") || strings.Count(name, "/") != 1 {
				t.Errorf("%q is taken for a name", name)
			}
		}
		// The same names as a list of one annotation give the same.
		if len(names) > 0 {
			value, _ := json.Marshal(strings.Join(names, ","))
			again, err := requested([]byte(annotated(`"cdi.k8s.io/a": ` + string(value))))
			if err != nil || !slices.Equal(again, names) {
				t.Errorf("%q became %q, %v", names, again, err)
			}
		}
	})
}
