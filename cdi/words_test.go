package cdi

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestErrorsAboutSpecsNameNoGoTypes(t *testing.T) {
	for name, c := range map[string]struct{ spec, says string }{
		"a key that is not known":     {`{"cdiVersion": "0.5.0", "kindd": "a.com/b"}`, "line 1: unknown key kindd"},
		"a list":                      {`[]`, "line 1: a list, want an object"},
		"text where a list should be": {`{"devices": "x"}`, "line 1: text `x`, want a list"},
		"text where a number should be": {
			`{"devices": [{"containerEdits": {"deviceNodes": [{"major": "one"}]}}]}`,
			"line 1: text `one`, want a whole number",
		},
		"a mode that is none": {
			`{"devices": [{"containerEdits": {"deviceNodes": [{"fileMode": "rw"}]}}]}`,
			"line 1: text `rw`, want a whole number",
		},
		"several": {"kindd: x\ndevices: 5\n", "line 1: unknown key kindd\nline 2: the number `5`, want a list"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "spec.yaml")
			if err := os.WriteFile(path, []byte(c.spec), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := ReadFile(path)
			if want := "read CDI spec " + path + ": " + c.says; err == nil || err.Error() != want {
				t.Errorf("error %v\nwant  %s", err, want)
			}
		})
	}
	if err := inWords(io.EOF); !errors.Is(err, io.EOF) {
		t.Errorf("another error becomes %v", err)
	}
}

func TestErrorsAboutConfigurationsNameNoGoTypes(t *testing.T) {
	for config, says := range map[string]string{
		`{"process": []}`:                                       "process: a list, want an object",
		`{"process": {"env": "x"}}`:                             "process.env: text, want a list",
		`{"process": {"user": {"uid": "x"}}}`:                   "process.user.uid: text, want a whole number",
		`{"process": {"terminal": 1}}`:                          "process.terminal: a number, want true or false",
		`{"linux": {"devices": [{"major": 1.5}]}}`:              "linux.devices.major: the number 1.5, want a whole number",
		`{"linux": {"memoryPolicy": 5}, "ociVersion": "1.0.2"}`: "linux.memoryPolicy: a number, want an object",
		`[]`: "a list, want an object",
		`5`:  "a number, want an object",
	} {
		_, err := parseConfig([]byte(config))
		if err == nil || !strings.HasSuffix(err.Error(), "not an OCI configuration: "+says) {
			t.Errorf("%s: %v, want %s", config, err, says)
		}
	}
}
