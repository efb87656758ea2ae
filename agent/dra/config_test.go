package dra

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestThePoliciesAreThoseOfPrepare(t *testing.T) {
	if want := prepare.Policies(); !slices.EqualFunc(policies, want, func(a string, b prepare.Policy) bool {
		return a == string(b)
	}) {
		t.Errorf("the policies are %v, want %v", policies, want)
	}
}

func TestConfigurations(t *testing.T) {
	const known = `"apiVersion":"gpu-cdi-plugin/v1","kind":"GPUConfig"`
	for text, want := range map[string]string{ // the policy, or after "!" a part of the error
		`{` + known + `}`:                                               "",
		`{` + known + `,"prestart":{}}`:                                 "",
		`{` + known + `,"prestart":{"policy":"clean"}}`:                 "clean",
		`{` + known + `,"prestart":{"policy":"reset"}}`:                 "reset",
		`{` + known + `,"prestart":{"policy":"scrub"}}`:                 `!"scrub", want one of none, check, clean, reset`,
		`{` + known + `,"prestart":{"strict":true}}`:                    `!unknown field "strict"`,
		`{` + known + `,"sharing":{}}`:                                  `!unknown field "sharing"`,
		`{` + known + `,"prestart":"clean"}`:                            "!cannot unmarshal string",
		`{"apiVersion":"gpu-cdi-plugin/v2","kind":"GPUConfig","new":1}`: `!its apiVersion is "gpu-cdi-plugin/v2"`,
		`{"apiVersion":"gpu-cdi-plugin/v1","kind":"GPUConfiguration"}`:  `!its kind "GPUConfiguration", want`,
		`{}`:                                  `!its apiVersion is "" and its kind "", want gpu-cdi-plugin/v1 and GPUConfig`,
		``:                                    "!unexpected end",
		`[]`:                                  "!cannot unmarshal array",
		strings.Repeat(" ", maxConfig) + `{}`: "!it has more than 10240 bytes",
	} {
		c := config{Source: fromClass}
		testenv.Must(t, json.Unmarshal([]byte(`{"opaque":{}}`), &c))
		c.Opaque.Parameters = []byte(text)
		err := c.parse()
		if part, fails := strings.CutPrefix(want, "!"); fails {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v, want an error with %q", text, err, part)
			}
			continue
		}
		if err != nil || c.policy != want {
			t.Errorf("%s: %q, %v, want %q", text, c.policy, err, want)
		}
	}
}

// A source that is unknown has the rights of a claim.
func TestOnlyADeviceClassCanAskForAReset(t *testing.T) {
	for source, allowed := range map[string]bool{"FromClass": true, "FromClaim": false, "": false} {
		c := config{}
		data, err := json.Marshal(policyOf(source, "reset"))
		testenv.Must(t, err, json.Unmarshal(data, &c))
		if err := c.parse(); (err == nil) != allowed ||
			err != nil && !strings.Contains(err.Error(), "prestart.policy reset is for DeviceClasses only") {
			t.Errorf("%q: %v, want it allowed: %t", source, err, allowed)
		}
	}
}

func FuzzParseParameters(f *testing.F) {
	f.Add([]byte(`{"apiVersion":"gpu-cdi-plugin/v1","kind":"GPUConfig","prestart":{"policy":"clean"}}`))
	f.Add([]byte(`{"apiVersion":"gpu-cdi-plugin/v1"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := parseParameters(data)
		if (p == nil) == (err == nil) {
			t.Fatalf("%v and the error %v, want exactly one", p, err)
		}
		if err == nil && (p.APIVersion != configVersion || p.Kind != configKind) {
			t.Errorf("accepted %+v", p)
		}
	})
}
