package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/trace"
	"holdfast/workflows/task"
)

// remote are the flags of commands that call a running service.
type remote struct{ url, token *string }

func addRemoteFlags(cmd *cobra.Command) *remote {
	return &remote{
		url:   cmd.Flags().String("url", "http://127.0.0.1:8080", "address of the service's API (environment: HOLDFAST_URL)"),
		token: cmd.Flags().String("api-token", "", "bearer token (environment: HOLDFAST_TOKEN)"),
	}
}

func (r *remote) connect(cmd *cobra.Command) (*client.Client, error) {
	url, token := *r.url, *r.token
	if env := os.Getenv("HOLDFAST_URL"); env != "" && !cmd.Flags().Changed("url") {
		url = env
	}
	if env := os.Getenv("HOLDFAST_TOKEN"); env != "" && token == "" {
		token = env
	}
	c, err := client.New(client.Config{BaseURL: url, Token: token})
	return c, badInput(err)
}

func newSubmit() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "submit",
		Short: "Submit a batch of tasks to a running service",
		Long: `Submits tasks, one JSON object a line, from a file or from standard input ("-"), or the
demo's mixed batch. Without --run it takes the pool's active run, or opens one with the
demo's contract. Repeating it with the same --key and tasks is harmless.`,
		Example: `  holdfast submit --demo
  holdfast submit --file tasks.jsonl --run 0f6d1c0a-... --key step-17`,
		Args: cobra.NoArgs,
	}
	r := addRemoteFlags(cmd)
	file := cmd.Flags().String("file", "", "file of tasks, one JSON object a line; - is standard input")
	cmd.Flags().Bool("demo", false, "submit the demo's batch: 60 agent, 40 RLVR and 22 RLHF sessions")
	seed := cmd.Flags().Uint64("seed", 1, "seed of the demo's batch")
	run := cmd.Flags().String("run", "", "run to submit to; empty takes the pool's active run or opens one")
	pool := cmd.Flags().String("pool", "default", "pool of the run, when --run is empty")
	key := cmd.Flags().String("key", "", "idempotency key; empty makes a new one, so that a repetition is a new batch")
	cmd.MarkFlagsMutuallyExclusive("file", "demo")
	cmd.MarkFlagsOneRequired("file", "demo")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		tasks, err := tasksToSubmit(cmd, *file, *seed)
		if err != nil {
			return err
		}
		c, err := r.connect(cmd)
		if err != nil {
			return err
		}
		defer c.Close()
		id, err := chosenRun(cmd, c, *run, *pool)
		if err != nil {
			return refusal(err)
		}
		if *key == "" {
			*key = uuid.NewString()
		}
		batch, err := c.SubmitBatch(cmd.Context(), id, *key, client.NewBatch{Tasks: tasks})
		if err != nil {
			return refusal(err)
		}
		return json.NewEncoder(cmd.OutOrStdout()).Encode(batch)
	}
	return cmd
}

// tasksToSubmit reads all tasks before anything is sent, so that a mistake in the
// last line costs nothing.
func tasksToSubmit(cmd *cobra.Command, file string, seed uint64) (iter.Seq2[task.Spec, error], error) {
	if file == "" {
		specs, err := trace.DemoBatch(seed)
		return client.Tasks(specs), err
	}
	in := cmd.InOrStdin()
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, badInput(err)
		}
		defer f.Close()
		in = f
	}
	specs, err := readTasks(in, file)
	return client.Tasks(specs), badInput(err)
}

// maxTaskLineBytes bounds one line of a file of tasks.
const maxTaskLineBytes = 16 << 20

func readTasks(in io.Reader, name string) ([]task.Spec, error) {
	var specs []task.Spec
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 64<<10), maxTaskLineBytes)
	for line := 1; lines.Scan(); line++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		spec, err := task.Decode(lines.Bytes(), "task")
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", name, line, err)
		}
		specs = append(specs, spec)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(specs) == 0 {
		return nil, fmt.Errorf("%s: holds no task", name)
	}
	return specs, nil
}

// chosenRun is the run that was named, the pool's active one, or a new one with
// the demo's contract.
func chosenRun(cmd *cobra.Command, c *client.Client, name, pool string) (uuid.UUID, error) {
	if name != "" {
		id, err := uuid.Parse(name)
		if err != nil {
			return id, badInput(fmt.Errorf("--run: %q is not the id of a run", name))
		}
		return id, nil
	}
	runs, err := c.Runs(cmd.Context(), client.RunsQuery{Pool: pool, State: "active"})
	if err != nil {
		return uuid.Nil, err
	}
	if len(runs.Runs) > 0 {
		return runs.Runs[0].ID, nil
	}
	run, err := c.CreateRun(cmd.Context(), demoRun("submit", pool))
	return run.ID, err
}

// demoRun asks for the paper's mixture, 48.6 / 33.1 / 18.2 %, which sums to 0.999
// and is normalised.
func demoRun(name, pool string) wire.NewRun {
	return wire.NewRun{Name: name, Pool: pool, Contract: wire.NewContract{
		Classes:        []wire.ClassShare{{Class: "agent", Share: 0.486}, {Class: "rlvr", Share: 0.331}, {Class: "rlhf", Share: 0.182}},
		MaxConcurrency: 1_000,
	}}
}

// refusal turns a 4xx answer into bad input that tells every mistake once: the detail
// has the first of them.
func refusal(err error) error {
	var problem *wire.Problem
	if !errors.As(err, &problem) || problem.Status < 400 || problem.Status >= 500 {
		return err
	}
	text := problem.Detail
	for _, detail := range problem.Errors {
		if mistake := detail.Location + " " + detail.Message; !strings.Contains(problem.Detail, mistake) {
			text += "; " + mistake
		}
	}
	return badInput(errors.New(text))
}
