package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
	"holdfast/orchestrator/trace"
	"holdfast/workflows/task"
)

// recorded is an environment server that answers as tau-bench's airline did in the
// recorded trials: each member of a group plays its own trial of the task, with the
// recorded number of answers, their lengths, and the recorded reward.
type recorded struct {
	// trials of a task, by the group's name.
	trials map[string][]*trace.Session

	mu       sync.Mutex
	episodes map[string]*trace.Session
	closed   map[string]bool
}

// tauGroups are the first n tasks of the shipped trace, each with its four trials.
func tauGroups(t *testing.T, n int) (names []string, trials map[string][]*trace.Session) {
	t.Helper()
	shipped, err := trace.LoadShipped(trace.TauBench)
	if err != nil {
		t.Fatal(err)
	}
	trials = map[string][]*trace.Session{}
	for i := range shipped.Sessions {
		s := &shipped.Sessions[i]
		if len(trials[s.Group]) == 0 {
			names = append(names, s.Group)
		}
		trials[s.Group] = append(trials[s.Group], s)
	}
	return names[:n], trials
}

func (r *recorded) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	var body struct {
		EpisodeID string `json:"episode_id"`
		Step      int    `json:"step"`
		Member    int    `json:"member"`
		Task      struct {
			Group string `json:"group"`
		} `json:"task"`
	}
	if err := json.NewDecoder(request.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch request.URL.Path {
	case "/reset":
		r.episodes[body.EpisodeID] = r.trials[body.Task.Group][body.Member]
		fmt.Fprint(w, `{}`)
	case "/step":
		trial := r.episodes[body.EpisodeID]
		// In the toy's vocabulary a small number is one token.
		text := strings.Repeat(" 7", max(0, trial.Turns[body.Step-1].AppendTokens))
		_ = json.NewEncoder(w).Encode(map[string]any{"observation": text, "done": body.Step == len(trial.Turns), "reward": trial.Reward})
	case "/close":
		delete(r.episodes, body.EpisodeID)
		r.closed[body.EpisodeID] = true
	}
}

// startGroups runs the service with an engine that says one thing.
func startGroups(t *testing.T, say string) *inProcess {
	t.Helper()
	s := startInProcess(t, 1, func(cfg *config.Config) {
		cfg.Environments = config.Environments{AllowedHosts: []string{"127.0.0.1"}}
	})
	if err := s.engines.servers[0].SetScript(simulated.Script{{After: "<assistant>", Say: say}}); err != nil {
		t.Fatal(err)
	}
	if err := s.engines.register(t.Context(), s.store, "default"); err != nil {
		t.Fatal(err)
	}
	return s
}

func groupTask(name, url string, about any) task.Spec {
	raw, err := json.Marshal(about)
	if err != nil {
		panic(err) // a map of strings
	}
	return task.Spec{
		ID: name, Class: "agent", GroupSize: 4, Prompt: task.Prompt{Messages: json.RawMessage(`[{"role":"system","content":"You are an airline's agent."}]`)},
		Sampling: task.Sampling{MaxTokens: 500}, Scorer: &task.Scorer{Kind: task.ScorerEnvironment},
		Environment: &task.Environment{Kind: task.EnvironmentHTTP, ToolFormat: toolcall.Hermes, HTTP: &spec.HTTPServer{URL: url, TimeoutSeconds: 60, Task: raw}},
	}
}

// groups reads whole groups until n have come.
func (s *inProcess) groups(ctx context.Context, t *testing.T, run uuid.UUID, n int) map[string][]wire.Sample {
	t.Helper()
	reader := s.client.Read(run, client.SamplesQuery{Consumer: "trainer", WholeGroups: true})
	groups := map[string][]wire.Sample{}
	for !whole(groups, n) {
		sample, err := reader.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		groups[sample.TaskID] = append(groups[sample.TaskID], *sample)
	}
	if err := reader.Ack(ctx); err != nil {
		t.Fatal(err)
	}
	return groups
}

// whole tells whether so many groups have come with all their members.
func whole(groups map[string][]wire.Sample, n int) bool {
	for _, members := range groups {
		if len(members) < members[0].GroupMembers {
			return false
		}
	}
	return len(groups) == n
}

// TestRecordedGroupsRunAsGroups runs tau-bench's tasks as groups of four, each member
// against its own recorded trial, and finds every trial in its place.
func TestRecordedGroupsRunAsGroups(t *testing.T) {
	ctx := within(t, 5*time.Minute)
	const count = 6
	names, trials := tauGroups(t, count)
	environment := &recorded{trials: trials, episodes: map[string]*trace.Session{}, closed: map[string]bool{}}
	server := httptest.NewServer(environment)
	defer server.Close()
	s := startGroups(t, "I look into it.")
	run, err := s.client.CreateRun(ctx, demoRun("tau", "default"))
	if err != nil {
		t.Fatal(err)
	}
	var tasks []task.Spec
	for _, name := range names {
		tasks = append(tasks, groupTask(name, server.URL, map[string]string{"group": name}))
	}
	if _, err := s.client.SubmitBatch(ctx, run.ID, "tau", client.NewBatch{Tasks: client.Tasks(tasks)}); err != nil {
		t.Fatal(err)
	}
	flat := int64(0)
	for name, members := range s.groups(ctx, t, run.ID, count) {
		rewards := map[float64]bool{}
		for i, sample := range members {
			trial := trials[name][i]
			rewards[*trial.Reward] = true
			if sample.Member != i || sample.Status != "completed" || sample.GroupOutcome != "complete" || sample.Usage.Turns != len(trial.Turns) || sample.Reward == nil || *sample.Reward != *trial.Reward {
				t.Errorf("%s, member %d: %s after %d turns with reward %v, recorded are %d turns and %v: %s", name, i, sample.Status, sample.Usage.Turns, sample.Reward, len(trial.Turns), *trial.Reward, sample.Problem)
			}
		}
		if len(rewards) == 1 {
			flat++
		}
	}
	backlog, err := s.client.Backlog(ctx, run.ID)
	if err != nil || backlog.Total.GroupsEnded != count || backlog.Total.GroupsWithoutSignal != flat {
		t.Errorf("%d groups without signal, want %d; %+v, %v", backlog.Total.GroupsWithoutSignal, flat, backlog.Total, err)
	}
	environment.mu.Lock()
	defer environment.mu.Unlock()
	if len(environment.episodes) != 0 || len(environment.closed) != 4*count || s.environments.Live() != 0 {
		t.Errorf("%d episodes are open, %d were closed, %d environments live", len(environment.episodes), len(environment.closed), s.environments.Live())
	}
}

// TestGroupWithAMemberWhoseEnvironmentFails: the environment of member 1 always fails,
// and the run's policy says what becomes of the group.
func TestGroupWithAMemberWhoseEnvironmentFails(t *testing.T) {
	ctx := within(t, 5*time.Minute)
	server := startServer(t, testBinary(t), "environment")
	s := startGroups(t, hermes("push", "{}"))
	for policy, want := range map[string]struct {
		outcome  string
		statuses []string
	}{
		"partial": {"partial", []string{"completed", "failed", "completed", "completed"}},
		"refill":  {"complete", []string{"completed", "failed", "completed", "completed", "completed"}},
		"end":     {"ended", []string{"", "failed", "", ""}},
	} {
		opened := demoRun(policy, "default")
		opened.Contract.GroupPolicy = policy
		run, err := s.client.CreateRun(ctx, opened)
		if err != nil {
			t.Fatal(err)
		}
		tasks := client.Tasks([]task.Spec{groupTask("group", server.url+"/unlucky", map[string]string{"house": "green"})})
		if _, err := s.client.SubmitBatch(ctx, run.ID, "one", client.NewBatch{Tasks: tasks}); err != nil {
			t.Fatal(err)
		}
		members := s.groups(ctx, t, run.ID, 1)["group"]
		if len(members) != len(want.statuses) {
			t.Errorf("%s: %d members came, want %d", policy, len(members), len(want.statuses))
		}
		for i, sample := range members {
			failed := sample.Status == "failed"
			if sample.Member != i || sample.GroupOutcome != want.outcome || failed != (i == 1) || want.statuses[i] != "" && sample.Status != want.statuses[i] ||
				(sample.Reward != nil) != (sample.Status == "completed") || failed && !strings.Contains(sample.Problem, "refused (status 422)") {
				t.Errorf("%s: member %d is %s with reward %v in a group that is %s: %s", policy, sample.Member, sample.Status, sample.Reward, sample.GroupOutcome, sample.Problem)
			}
			// Others were completed before, or are cancelled with the group.
			if policy == "end" && !failed && sample.Status != "completed" && sample.Status != "cancelled" {
				t.Errorf("end: member %d is %s", i, sample.Status)
			}
		}
		if _, err := s.client.EndRun(ctx, run.ID); err != nil {
			t.Fatal(err)
		}
	}
	if open, live := server.ask(t, "/open"), s.environments.Live(); open != 0 || live != 0 {
		t.Errorf("%d episodes are open, %d environments live", open, live)
	}
}
