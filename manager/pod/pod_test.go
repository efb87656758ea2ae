package pod_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/pod"
	"gpu-cdi-plugin/test/lib/testenv"
)

const head = "apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: n, uid: u}\n"

func one(limits map[string]int) model.Pod {
	return model.Pod{
		UID: "u", Namespace: "n", Name: "a", Containers: []model.Container{{Name: "c", Limits: limits}},
	}
}

const noClaims = "the device manager has no dynamic resource allocation: request devices as limits"

func TestParse(t *testing.T) {
	gpus := func(n int) map[string]int { return map[string]int{"nvidia.com/gpu": n} }
	limits := func(text string) string {
		return head + "spec: {containers: [{name: c, resources: {limits: " + text + "}}]}"
	}
	for name, c := range map[string]struct {
		manifest string
		want     model.Pod
	}{
		"a pod without devices":  {head + "spec: {containers: [{name: c}]}", one(nil)},
		"a number":               {limits("{nvidia.com/gpu: 2}"), one(gpus(2))},
		"a number as text":       {limits(`{nvidia.com/gpu: "2"}`), one(gpus(2))},
		"a number with a suffix": {limits("{nvidia.com/gpu: 2k}"), one(gpus(2000))},
		"thousandths":            {limits("{nvidia.com/gpu: 3000m}"), one(gpus(3))},
		"zero":                   {limits("{nvidia.com/gpu: 0}"), one(gpus(0))},
		"resources that are no devices": {
			limits("{cpu: 500m, memory: 1.5Gi, hugepages-2Mi: 4Mi}"), one(nil),
		},
		"the old name of GPUs, which no plugin can offer": {
			limits("{alpha.kubernetes.io/nvidia-gpu: 1}"), one(map[string]int{"alpha.kubernetes.io/nvidia-gpu": 1}),
		},
		"requests that equal the limits": {
			head + "spec: {containers: [{name: c, resources: {limits: {a.b/c: 1k, cpu: 2}, requests: {a.b/c: 1000, cpu: 1}}}]}",
			one(map[string]int{"a.b/c": 1000}),
		},
		"JSON with tabs, and characters in halves": {
			"{\n\t\"apiVersion\": \"v1\", \"kind\": \"Pod\",\n\t\"metadata\": {\"name\": \"a\", \"namespace\": \"n\", " +
				`"uid": "u", "annotations": {"x": "\ud83d\ude00 \\ud83d\\ude00 \/ \t"}},` +
				"\n\t\"spec\": {\"containers\": [{\"name\": \"c\", \"resources\": {\"limits\": {\"nvidia.com/gpu\": 1}}}]}}",
			one(gpus(1)),
		},
		"a document mark": {"---\n" + head + "spec: {containers: [{name: c}]}", one(nil)},
		"anything in other fields": {
			head + "spec: {containers: [{name: c, env: {x: [1]}}], volumes: 5}\nstatus: [x]", one(nil),
		},
		"fields without a value": {head + "spec: {volumes: , containers: [{name: c, resources: }]}", one(nil)},
		"no namespace and no UID": {
			"apiVersion: v1\nkind: Pod\nmetadata: {name: a.b}\nspec: {containers: [{name: c}]}",
			model.Pod{
				UID: "e10bb70e-34f6-8eca-9d64-2054aceea239", Namespace: "default", Name: "a.b",
				Containers: []model.Container{{Name: "c"}},
			},
		},
		"a UID that ends in a sign": {
			"apiVersion: v1\nkind: Pod\nmetadata: {name: a, uid: x_}\nspec: {containers: [{name: c}]}",
			model.Pod{UID: "x_", Namespace: "default", Name: "a", Containers: []model.Container{{Name: "c"}}},
		},
		"init containers and sidecars": {
			head + "spec:\n  initContainers: [{name: i, restartPolicy: Never}, {name: s, restartPolicy: Always}]\n" +
				"  containers: [{name: c, restartPolicy: Always}]\n  restartPolicy: OnFailure",
			model.Pod{
				UID: "u", Namespace: "n", Name: "a",
				InitContainers: []model.Container{{Name: "i"}, {Name: "s", Sidecar: true}},
				Containers:     []model.Container{{Name: "c"}},
			},
		},
		"what kubectl get prints": {kubectlGet, model.Pod{
			UID: "2a8f4f0e-6f0b-4d0c-9a53-5d4b6f1c7d11", Namespace: "default", Name: "cuda",
			Containers: []model.Container{{Name: "main", Limits: gpus(1)}},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := pod.Parse([]byte(c.manifest))
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

const kubectlGet = `apiVersion: v1
kind: Pod
metadata:
  creationTimestamp: "2026-01-01T00:00:00Z"
  generation: 1
  labels: {app: cuda}
  managedFields: [{apiVersion: v1, fieldsType: FieldsV1, fieldsV1: {"f:spec": {}}, manager: kubectl}]
  name: cuda
  namespace: default
  resourceVersion: "123"
  uid: 2a8f4f0e-6f0b-4d0c-9a53-5d4b6f1c7d11
spec:
  containers:
  - image: nvcr.io/nvidia/cuda
    imagePullPolicy: IfNotPresent
    name: main
    resources:
      limits:
        nvidia.com/gpu: "1"
      requests:
        nvidia.com/gpu: "1"
    terminationMessagePath: /dev/termination-log
  dnsPolicy: ClusterFirst
  nodeName: node
  restartPolicy: Always
  serviceAccountName: default
status:
  phase: Running
`

func TestParseRefuses(t *testing.T) {
	spec := func(text string) string { return head + "spec: " + text }
	limits := func(text string) string { return spec("{containers: [{name: c, resources: {limits: " + text + "}}]}") }
	for name, c := range map[string]struct {
		manifest string
		problems []string // all of them, in order
	}{
		"nothing": {"", []string{
			`apiVersion: want v1, got ""`, `kind: want Pod, got ""`, "metadata.name: it is missing",
			"spec.containers: want at least one container",
		}},
		"another kind": {
			"apiVersion: apps/v1\nkind: pod\nmetadata: {name: a}\nspec: {containers: [{name: c}]}",
			[]string{`apiVersion: want v1, got "apps/v1"`, `kind: want Pod, got "pod"; did you mean Pod?`},
		},
		"resource claims": {
			spec("{containers: [{name: c}], resourceClaims: [{name: gpu}]}"),
			[]string{"spec.resourceClaims: " + noClaims},
		},
		"resource claims of containers": {
			spec("{containers: [{name: c, resources: {claims: [{name: gpu}]}}], " +
				"initContainers: [{name: i, resources: {claims: [{name: gpu}]}}]}"),
			[]string{
				"spec.initContainers[0].resources.claims: " + noClaims, "spec.containers[0].resources.claims: " + noClaims,
			},
		},
		"resource claims in the pod's resources": {
			spec("{containers: [{name: c}], resources: {claims: [{name: gpu}]}}"),
			[]string{"spec.resources.claims: " + noClaims},
		},
		"an ephemeral container with devices and claims": {
			spec("{containers: [{name: c}], ephemeralContainers: [{name: d, targetContainerName: c}, " +
				"{name: e, resources: {limits: {a.b/c: 1}, claims: [{name: gpu}]}}]}"),
			[]string{
				"spec.ephemeralContainers[1].resources.claims: " + noClaims,
				"spec.ephemeralContainers[1].resources: only containers and init containers can have devices, " +
					"but an ephemeral container requests a.b/c",
			},
		},
		"overhead with devices": {
			spec("{containers: [{name: c}], overhead: {cpu: 100m, a.b/c: 1}}"),
			[]string{
				"spec.overhead: only containers and init containers can have devices, but the overhead requests a.b/c",
			},
		},
		"a generated name": {
			"apiVersion: v1\nkind: Pod\nmetadata: {generateName: a-}\nspec: {containers: [{name: c}]}",
			[]string{
				"metadata.generateName: only an API server makes a name of it: write metadata.name",
				"metadata.name: it is missing",
			},
		},
		"a workload": {
			"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec: {replicas: 1}",
			[]string{"kind Deployment: only a cluster makes pods of it: admit a pod with the spec of its template " +
				"(spec.template.spec), kind Pod and a name"},
		},
		"a list": {
			"apiVersion: v1\nkind: List\nitems: []", []string{"kind List: admit its pods one by one"},
		},
		"two documents": {head + "---\n" + head, []string{"more than one YAML document"}},
		"unknown fields": {
			"apiVersion: v1\nkind: Pod\nMetadata: {}\nmetadata: {nam: a}\n" +
				"spec: {container: [], containers: [{name: c, image: x, resource: {}, resources: {limit: {}}}]}",
			[]string{
				"line 3: unknown key Metadata; did you mean metadata?",
				"line 4: unknown key metadata.nam; did you mean name or namespace?",
				"line 5: unknown key spec.container; did you mean containers?",
				"line 5: unknown key spec.containers[0].resource; did you mean resources?",
				"line 5: unknown key spec.containers[0].resources.limit; did you mean limits?",
			},
		},
		"a key twice": {limits("{a.b/c: 1, a.b/c: 2}"), []string{`line 4: duplicate key a.b/c, first in line 4`}},
		"no quantities": {limits(`{a.b/c: x, a.b/d: -1, a.b/e: 1.5, a.b/f: 3G, cpu: 1g, memory: ""}`), []string{
			`spec.containers[0].resources.limits.a.b/c: "x": want a quantity, such as 2, 500m or 16Gi`,
			"spec.containers[0].resources.limits.a.b/d: want 0 or more, got -1",
			"spec.containers[0].resources.limits.a.b/e: want a whole number up to 2147483647, got 1.5",
			"spec.containers[0].resources.limits.a.b/f: want a whole number up to 2147483647, got 3G",
			`spec.containers[0].resources.limits.cpu: "1g": want a quantity, such as 2, 500m or 16Gi`,
			`spec.containers[0].resources.limits.memory: "": want a quantity, such as 2, 500m or 16Gi`,
		}},
		"no resource names": {limits("{gpu: 1, Memory: 1, a b/c: 1, requests.a/b: 1}"), []string{
			`spec.containers[0].resources.limits: resource name "Memory": want VENDOR/NAME, such as nvidia.com/gpu; ` +
				"did you mean memory?",
			`spec.containers[0].resources.limits: resource name "a b/c": the vendor is not a domain name of lower-case ` +
				"letters, digits, hyphens and dots",
			`spec.containers[0].resources.limits: resource name "gpu": want VENDOR/NAME, such as nvidia.com/gpu; ` +
				"did you mean cpu?",
			`spec.containers[0].resources.limits: resource name "requests.a/b": the prefix requests. is reserved for quotas`,
		}},
		"requests that differ": {
			spec("{containers: [{name: c, resources: {limits: {a.b/c: 1}, requests: {a.b/c: 2, a.b/d: 1}}}]}"),
			[]string{
				"spec.containers[0].resources.requests.a.b/c: want the limit, 1, got 2",
				"spec.containers[0].resources.requests.a.b/d: devices need a limit too",
			},
		},
		"devices of the whole pod": {
			spec("{containers: [{name: c}], resources: {limits: {a.b/c: 1, cpu: 1}}}"),
			[]string{"spec.resources: only containers and init containers can have devices, but the pod requests a.b/c"},
		},
		"a name twice": {
			spec("{initContainers: [{name: c}], containers: [{name: c}, {name: d}, {name: d}]}"),
			[]string{
				`spec.containers[0].name: another container also has the name "c"`,
				`spec.containers[2].name: another container also has the name "d"`,
			},
		},
		"no names": {
			"apiVersion: v1\nkind: Pod\nmetadata: {name: A, namespace: a.b, uid: ../x}\n" +
				"spec: {containers: [{name: -c}, {}, {name: " + strings.Repeat("x", 64) + "}]}",
			[]string{
				`metadata.name: want lower-case letters and digits, and hyphens or dots between them, got "A"`,
				`metadata.namespace: want lower-case letters and digits, and hyphens between them, got "a.b"`,
				`metadata.uid: want a letter or digit, and then letters, digits, hyphens, underscores or dots, got "../x"`,
				`spec.containers[0].name: want lower-case letters and digits, and hyphens between them, got "-c"`,
				"spec.containers[1].name: it is missing",
				"spec.containers[2].name: it has 64 characters, more than 63",
			},
		},
		"no restart policies": {
			spec("{restartPolicy: always, initContainers: [{name: i, restartPolicy: x}], containers: [{name: c}]}"),
			[]string{
				`spec.restartPolicy: want Always or OnFailure or Never, got "always"; did you mean Always?`,
				`spec.initContainers[0].restartPolicy: want Always or OnFailure or Never, got "x"`,
			},
		},
		"too large": {head + strings.Repeat("#", pod.MaxSize), []string{"it is larger than 256 KiB"}},
		"too deep": {
			spec("{containers: [{name: c}], volumes: " + strings.Repeat("[", 200) + strings.Repeat("]", 200) + "}"),
			[]string{"line 4: it is nested more than 100 levels deep"},
		},
		"an alias of itself": {
			spec("&a {containers: [{name: c}], volumes: *a}"), []string{"line 4: it is nested more than 100 levels deep"},
		},
		"aliases of aliases": {
			spec("\n  a: &a [" + strings.Repeat("x,", 1000) + "]\n  b: [" + strings.Repeat("*a,", 1000) + "]\n"),
			[]string{"it has more than 300000 values, with aliases expanded and long texts counted as several"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := pod.Parse([]byte(c.manifest))
			if !errors.Is(err, pod.ErrInvalid) {
				t.Fatalf("%v, and %v", got, err)
			}
			problems := strings.Split(strings.TrimPrefix(err.Error(), pod.ErrInvalid.Error()+": "), "\n")
			if diff := cmp.Diff(c.problems, problems); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestTheLargestManifestIsRead(t *testing.T) {
	text := head + "spec: {containers: [{name: c}]}\n#"
	if _, err := pod.Parse([]byte(text + strings.Repeat("#", pod.MaxSize-len(text)))); err != nil {
		t.Error(err)
	}
}

func TestUIDIsThatOfNamespaceAndName(t *testing.T) {
	uids := map[string]string{}
	for _, metadata := range []string{"name: a", "name: b", "name: a, namespace: x", "name: default"} {
		manifest := "apiVersion: v1\nkind: Pod\nmetadata: {" + metadata + "}\nspec: {containers: [{name: c}]}"
		first, err := pod.Parse([]byte(manifest))
		testenv.Must(t, err)
		again, err := pod.Parse([]byte(strings.Replace(manifest, "name: c", "name: d", 1)))
		if err != nil || again.UID != first.UID {
			t.Errorf("%s: %q, and %q with another container (%v)", metadata, first.UID, again.UID, err)
		}
		if other, ok := uids[first.UID]; ok {
			t.Errorf("%s and %s have the same UID", metadata, other)
		}
		uids[first.UID] = metadata
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(kubectlGet))
	f.Add([]byte(head + "spec: {containers: [{name: c, resources: {limits: {a.b/c: 2k}}}]}"))
	f.Add([]byte(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "\ud83d\ude00"}}`))
	f.Add([]byte(head + "spec: &a {containers: [*a], <<: *a}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := pod.Parse(data)
		switch {
		case err != nil && !cmp.Equal(p, model.Pod{}):
			t.Errorf("%+v and %v", p, err)
		case err != nil && !errors.Is(err, pod.ErrInvalid):
			t.Error(err)
		case err == nil && (p.UID == "" || p.Name == "" || p.Namespace == "" || len(p.Containers) == 0):
			t.Errorf("%+v", p)
		}
	})
}
