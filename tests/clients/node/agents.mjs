// The OpenAI Agents SDK for JavaScript.

import {
  Agent,
  applyPatchTool,
  OpenAIConversationsSession,
  OpenAIProvider,
  OpenAIResponsesCompactionSession,
  Runner,
  RunState,
  shellTool,
  tool,
  toolNamespace,
  toolSearchTool,
  withResponsesWebSocketSession,
} from '@openai/agents';
import OpenAI from 'openai';
import { WebSocket } from 'ws';
import { z } from 'zod';
import { readAll, runCases } from './harness.mjs';

// Node has its own WebSocket since version 22.
globalThis.WebSocket ??= WebSocket;

await runCases(({ url, model }) => {
  const client = new OpenAI({ baseURL: url, apiKey: 'any', maxRetries: 0 });
  const runner = new Runner({ modelProvider: new OpenAIProvider({ openAIClient: client }), tracingDisabled: true });
  const calls = [];

  /** Make a tool that returns a fixed output for a city and records its calls. */
  const makeTool = (name, output, more) =>
    tool({
      name,
      description: `Get the ${output} of a city`,
      parameters: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        calls.push(`${name} ${city}`);
        return output;
      },
      ...more,
    });

  const poet = new Agent({ name: 'poet', instructions: 'Rhyme.', model });
  const guide = new Agent({
    name: 'guide',
    instructions: 'Find out.',
    model,
    tools: [makeTool('get_weather', 'mild'), makeTool('get_time', 'noon')],
    handoffs: [poet],
  });

  const summarize = ({ finalOutput, lastAgent }) => ({ text: finalOutput, by: lastAgent.name, calls: calls.sort() });

  /** Run the guide twice. The second run needs the history of the first. */
  async function runTwice(first, second, run = runner) {
    const result = await run.run(guide, 'a poem', first);
    const again = await run.run(guide, 'once more', second(result));
    return { ...summarize(result), again: again.finalOutput };
  }

  async function use(name, tools) {
    const worker = new Agent({ name: 'worker', model, tools });
    return (await runner.run(worker, `use ${name}`)).finalOutput;
  }

  return {
    chain: () => runTwice({}, (result) => ({ previousResponseId: result.lastResponseId })),

    async conversation() {
      const { id } = await client.conversations.create();
      const outcome = await runTwice({ conversationId: id }, () => ({ conversationId: id }));
      const items = await readAll(client.conversations.items.list(id, { order: 'asc' }));
      return { ...outcome, items: items.map(({ type }) => type) };
    },

    async session() {
      const session = new OpenAIConversationsSession({ client });
      const outcome = await runTwice({ session }, () => ({ session }));
      const count = (await session.getItems()).length;
      const last = await session.popItem();
      await session.clearSession();
      return { ...outcome, count, last: last.content[0].text };
    },

    websocket: () =>
      withResponsesWebSocketSession(
        (session) => runTwice({}, (result) => ({ previousResponseId: result.lastResponseId }), session.runner),
        { providerOptions: { baseURL: url, apiKey: 'any' }, runnerConfig: { tracingDisabled: true } },
      ),

    async streamed() {
      const result = await runner.run(guide, 'a poem', { stream: true });
      const events = await readAll(result);
      await result.completed;
      const texts = events.flatMap(({ data }) => (data?.type === 'output_text_delta' ? data.delta : []));
      return { ...summarize(result), joined: texts.join(''), types: [...new Set(events.map(({ type }) => type))].sort() };
    },

    async structured() {
      const outputType = z.object({ name: z.string(), age: z.number().int() });
      return (await runner.run(new Agent({ name: 'clerk', model, outputType }), 'profile')).finalOutput;
    },

    // The client stores the history, with encrypted reasoning.
    async reasoning() {
      const modelSettings = {
        store: false,
        reasoning: { effort: 'low', summary: 'auto' },
        providerData: { include: ['reasoning.encrypted_content'] },
      };
      const worker = new Agent({ name: 'worker', model, modelSettings, tools: [makeTool('get_weather', 'mild')] });
      const result = await runner.run(worker, 'think');
      return { text: result.finalOutput, items: result.newItems.map(({ type }) => type) };
    },

    // The run pauses for approval and is resumed from its serialized state.
    async approval() {
      const tools = [makeTool('get_weather', 'mild', { needsApproval: true })];
      const worker = new Agent({ name: 'worker', model, tools });
      const paused = await runner.run(worker, 'think');
      const state = await RunState.fromString(worker, paused.state.toString());
      const before = [...calls];
      for (const each of state.getInterruptions()) state.approve(each);
      return { before, text: (await runner.run(worker, state)).finalOutput, after: calls };
    },

    async compaction() {
      const session = new OpenAIResponsesCompactionSession({ client, model, shouldTriggerCompaction: () => true });
      const clerk = new Agent({ name: 'clerk', model });
      await runner.run(clerk, 'my name is ada', { session });
      const items = await session.getItems();
      const again = await runner.run(clerk, 'recall', { session });
      return { items: items.map(({ type, role }) => type ?? role), text: again.finalOutput };
    },

    shell: () =>
      use('shell', [
        shellTool({
          shell: {
            run: async ({ commands }) => ({
              output: commands.map((command) => ({
                stdout: `ran ${command}`,
                stderr: '',
                outcome: { type: 'exit', exitCode: 0 },
              })),
            }),
          },
        }),
      ]),

    async apply_patch() {
      const act = async ({ path }) => ({ status: 'completed', output: `created ${path}` });
      return use('apply_patch', [applyPatchTool({ editor: { createFile: act, updateFile: act, deleteFile: act } })]);
    },

    namespace: () =>
      use(
        'namespace',
        toolNamespace({ name: 'sky', description: 'What is above.', tools: [makeTool('get_weather', 'mild')] }),
      ),

    search: () => use('search', [toolSearchTool(), makeTool('get_weather', 'mild', { deferLoading: true })]),

    async embedded() {
      const worker = new Agent({
        name: 'worker',
        model,
        modelSettings: { temperature: 0, maxTokens: 40, toolChoice: 'get_weather' },
        tools: [makeTool('get_weather', 'mild')],
        toolUseBehavior: 'stop_on_first_tool',
      });
      const result = await runner.run(worker, 'What is the weather in Paris?', { maxTurns: 1 });
      return { text: result.finalOutput, calls: calls.map((each) => each.split(' ')[0]) };
    },
  };
});
