package inject

import (
	"errors"
	"strings"
	"testing"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
)

// bundle is a config.json and the owner of its bundle, which is nil for a precreate hook.
type bundle struct {
	config string
	owner  *uint32
}

const (
	userNamespace = `"namespaces": [{"type": "mount"}, {"type": "user"}]`
	mapped        = `, "uidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}]`
	mapsRoot      = `, "uidMappings": [{"containerID": 1, "hostID": 100000}, {"containerID": 0, "hostID": 0, "size": 1}]`
)

// of has a team in its annotations, and keys of linux.
func of(team, linux string) bundle {
	return bundle{config: `{"annotations": {"team": "` + team + `"}, "linux": {` + linux + `}}`}
}

func (b bundle) by(uid uint32) bundle {
	b.owner = &uid
	return b
}

func TestRules(t *testing.T) {
	ours := &cdi.SpecFile{Path: "/run/cdi/ours.json", Spec: ownSpec("/usr/bin/prestart-hook")}
	theirs := &cdi.SpecFile{Path: "/run/cdi/theirs.json", Spec: &specs.Spec{Kind: "their.com/disk"}}
	const (
		teams = `
rules:
- {annotations: {team: blue}, devices: [nvidia.com/gpu=0]}
- {annotations: {team: "red*"}, devices: [nvidia.com/gpu=1]}`
		isolated = "rules: [{user-namespace: true}]"
		shared   = "rules: [{user-namespace: false}]"
		owners   = "rules: [{bundle-owner: [0, 1000]}]"
	)
	for name, tc := range map[string]struct {
		policy    string
		container bundle
		device    string
		allocated bool
		err       string // empty if the device is allowed
	}{
		"the first rule":             {teams, of("blue", ""), "nvidia.com/gpu=0", false, ""},
		"another rule, by a pattern": {teams, of("red-1", ""), "nvidia.com/gpu=1", false, ""},
		"a device of another team": {
			teams, of("blue", ""), "nvidia.com/gpu=1", false,
			`no rule allows it (rule 1: it is not among the devices that are allowed; rule 2: the annotation "team" is "blue")`,
		},
		"of no team": {
			teams, bundle{config: "{}"}, "nvidia.com/gpu=0", false, `rule 1: the container has no annotation "team"`,
		},
		"a value with a line break": {
			teams, of(`blue\n`, ""), "nvidia.com/gpu=0", false, `rule 1: the annotation "team" is "blue\n"`,
		},
		"no rules": {
			"rules: []", of("blue", ""), "nvidia.com/gpu=0", false, "no rule allows it (there are none)",
		},
		"a null":        {"rules:", of("blue", ""), "nvidia.com/gpu=0", false, ""},
		"an empty rule": {"rules: [{}]", bundle{config: "{}"}, "nvidia.com/gpu=0", false, ""},
		"every condition": {
			"rules: [{annotations: {team: blue}, bundle-owner: 0}]", of("blue", "").by(0), "nvidia.com/gpu=0", false, "",
		},
		"one condition of two": {
			"rules: [{annotations: {team: blue}, bundle-owner: 0}]", of("blue", "").by(1), "nvidia.com/gpu=0", false,
			"rule 1: the bundle belongs to user 1",
		},

		"a user namespace": {isolated, of("", userNamespace+mapped), "nvidia.com/gpu=0", false, ""},
		"none": {
			isolated, of("", ""), "nvidia.com/gpu=0", false, "rule 1: the container has no user namespace",
		},
		"a mapping without one": {
			isolated, of("", mapped[2:]), "nvidia.com/gpu=0", false, "has no user namespace",
		},
		"one with the host's root": {
			isolated, of("", userNamespace+mapsRoot), "nvidia.com/gpu=0", false, "the host's root may be a user",
		},
		"one with the host's root group": {
			isolated, of("", userNamespace+mapped+strings.Replace(mapsRoot, "uid", "gid", 1)), "nvidia.com/gpu=0", false,
			"the host's root may be a user or group",
		},
		"one that exists, with mappings that the runtime ignores": {
			isolated, of("", `"namespaces": [{"type": "user", "path": "/proc/1/ns/user"}]`+mapped), "nvidia.com/gpu=0", false,
			"the host's root may be a user",
		},
		"one whose mapping is unknown": {
			isolated, of("", userNamespace), "nvidia.com/gpu=0", false, "the host's root may be a user",
		},
		"none may be": {shared, of("", ""), "nvidia.com/gpu=0", false, ""},
		"one where none may be": {
			shared, of("", userNamespace+mapsRoot), "nvidia.com/gpu=0", false, "has a user namespace",
		},

		"a bundle of a user": {owners, of("", "").by(1000), "nvidia.com/gpu=0", false, ""},
		"of another one": {
			owners, of("", "").by(1001), "nvidia.com/gpu=0", false, "rule 1: the bundle belongs to user 1001",
		},
		"no bundle": {owners, of("", ""), "nvidia.com/gpu=0", false, "not known to a precreate hook"},

		"the limits of all": {
			"devices: [nvidia.com/gpu=1]\nrules: [{devices: [nvidia.com/gpu=1]}]", of("", ""), "nvidia.com/gpu=0", false,
			"it is not among the devices that are allowed",
		},
		"the limits of all come before an open rule": {
			"devices: [nvidia.com/gpu=1]\nrules: [{}]", of("", ""), "nvidia.com/gpu=0", false, "not among the devices",
		},
		"another program's kind, which a rule has": {
			"rules: [{kinds: [their.com/disk]}]", of("", ""), "their.com/disk=all", false, "",
		},
		"another program's kind, which all have": {
			"kinds: [their.com/disk]\nrules: [{}]", of("", ""), "their.com/disk=all", false, "",
		},
		"another program's kind, which no rule has": {
			"rules: [{}]", of("", ""), "their.com/disk=all", false,
			"rule 1: /run/cdi/theirs.json was written by another program, and its kind their.com/disk is not allowed",
		},

		"all devices allocated":   {"allocated: true", of("", ""), "nvidia.com/gpu=0", true, ""},
		"by default not":          {"allocated: false", of("", ""), "nvidia.com/gpu=0", false, ""},
		"allocated by a rule":     {"rules: [{allocated: true}]", of("", ""), "nvidia.com/gpu=0", true, ""},
		"one rule of two without": {"rules: [{allocated: true}, {}]", of("", ""), "nvidia.com/gpu=0", false, ""},
		"a rule does not undo it": {
			"allocated: true\nrules: [{allocated: false}]", of("", ""), "nvidia.com/gpu=0", true, "",
		},
		"the rule that is not does not fit": {
			"rules: [{allocated: true}, {bundle-owner: 0}]", of("", "").by(1), "nvidia.com/gpu=0", true, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := parsePolicy([]byte(tc.policy))
			if err != nil {
				t.Fatal(err)
			}
			c, err := readContainer([]byte(tc.container.config), tc.container.owner)
			if err != nil {
				t.Fatal(err)
			}
			file := ours
			if strings.HasPrefix(tc.device, "their") {
				file = theirs
			}
			allocated, err := p.check(c, tc.device, file)
			checkError(t, err, tc.err)
			if allocated != tc.allocated {
				t.Errorf("the device must be allocated: %v", allocated)
			}
		})
	}
}

func TestMatches(t *testing.T) {
	for pattern, texts := range map[string]map[string]bool{
		"":      {"": true, "a": false},
		"a":     {"a": true, "": false, "aa": false, "A": false},
		"*":     {"": true, "a/b": true, "*": true},
		"a*":    {"a": true, "a/b": true, "ba": false},
		"*a":    {"a": true, "ba": true, "ab": false},
		"ab*ba": {"abba": true, "ab-ba": true, "aba": false},
		"a*b*c": {"abc": true, "a-b-c": true, "acb": false, "ac": false, "abcbc": true},
		"a[b]?": {"a[b]?": true, "abc": false},
		"a**b":  {"ab": true, "axb": true},
	} {
		for text, want := range texts {
			if got := matches(pattern, text); got != want {
				t.Errorf("%q is %q: %v, want %v", text, pattern, got, want)
			}
		}
	}
}

func TestContainersThatAreNoConfiguration(t *testing.T) {
	n := newNode(t)
	n.write("hook.yaml", "rules: [{user-namespace: false}]")
	_, err := n.Config([]byte(`{"annotations": {"cdi.k8s.io/a": "nvidia.com/gpu=0", "x": 1}}`))
	checkError(t, err, `device nvidia.com/gpu=0 is not given: read config.json: "annotations" has the wrong type`)
}

func FuzzContainer(f *testing.F) {
	f.Add([]byte(of("blue", userNamespace+mapsRoot).config))
	f.Add([]byte(`{"linux": {"cgroupsPath": "a:b:c", "uidMappings": [{"hostID": -1}]}}`))
	isolated := true
	policies := []rule{{UserNamespace: &isolated}, {Annotations: map[string]string{"a": "*"}}, {BundleOwner: []int{0}}}
	f.Fuzz(func(t *testing.T, config []byte) {
		c, err := readContainer(config, nil)
		if (c == nil) != (err != nil) {
			t.Fatalf("%+v and the error %v", c, err)
		}
		if err != nil {
			return
		}
		for i := range policies {
			fits := policies[i].fits(c) == nil
			if i == 0 && fits && (!c.userNamespace || c.hostRoot) || i == 1 && fits && c.annotations == nil ||
				i == 2 && fits {
				t.Errorf("rule %d fits %s", i, config)
			}
		}
		if p, err := (Injector{PodLogs: "/none"}).podOf(c); p != nil || err == nil || errors.Unwrap(err) != nil {
			t.Errorf("%s is of the pod %v, %v", config, p, err)
		}
	})
}
